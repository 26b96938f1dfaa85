"""Llamas whose embeddings are scaled, as transformers runs them and as a record."""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polybasic.chain.formats.families.family import Family

SCALE = 3.0


class ToyConfig(LlamaConfig):
    """As Llama's."""

    model_type = "toy"


class ScaledEmbedding(nn.Embedding):
    """Embeddings times `SCALE`."""

    def forward(self, ids: Tensor) -> Tensor:
        """Of ids [...], [..., hidden size]."""
        return super().forward(ids) * SCALE


class ToyForCausalLM(LlamaForCausalLM):
    """A Llama that embeds otherwise."""

    config_class = ToyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)


AutoConfig.register("toy", ToyConfig, exist_ok=True)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)

FAMILY = Family("toy", lambda read: {"embedding_scale": SCALE})
