"""The frozen target: its features, its lm_head, and what they tell about a head for it."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from polybasic.chain.errors import UserError
from polybasic.chain.reference_model import load_reference_model
from polybasic.train.head import HeadShape


@dataclass(frozen=True)
class Target:
    """A loaded target in its own dtype; nothing of it is ever trained."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    lm_head: Tensor
    """[V, H]"""

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.lm_head.device

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return _weight(self.model.get_input_embeddings())

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of right-padded `token_ids` [B, T]."""
        return self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state

    def head_shape(self, intermediate_size: int | None) -> HeadShape:
        """The shape of a head for this target; its MLP's size is the target's unless given."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None)
        return HeadShape(
            vocab_size=self.lm_head.shape[0],
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size or config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            context_tokens=config.max_position_embeddings,
        )


def load_target(folder: Path, device: torch.device) -> Target:
    """Load a transformers checkpoint with its tokenizer; code in the folder is never run.

    Raises:
        UserError: the folder is no causal language model, or its logits are not
            lm_head(final norm(hidden state)) as in the Llama family.
    """
    model = load_reference_model(folder, "auto", device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "cannot load the target's tokenizer",
            f"{folder} ({str(error).strip().splitlines()[0]})",
            "name a folder that transformers' AutoTokenizer loads",
        ) from error
    model.requires_grad_(False)
    _check_layout(model, folder)
    return Target(model, tokenizer, _weight(model.get_output_embeddings()))


@torch.no_grad()
def _check_layout(model: PreTrainedModel, folder: Path) -> None:
    described = f"{folder} (model_type {model.config.model_type})"
    lm_head = model.get_output_embeddings()
    is_llama_like = all(
        hasattr(model.config, name) for name in ("rms_norm_eps", "rope_parameters", "hidden_size")
    )
    if is_llama_like and hasattr(model, "model") and "rope_theta" in model.config.rope_parameters:
        token_ids = torch.arange(8, device=model.device)[None] % model.config.vocab_size
        expected = model(input_ids=token_ids, use_cache=False).logits
        states = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        if torch.allclose(F.linear(states, _weight(lm_head)), expected, rtol=1e-2, atol=1e-2):
            return
    raise UserError(
        "target without the Llama family's layout",
        described,
        "use a model with RMS norms, rotary positions and logits = lm_head(final norm)",
    )


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
