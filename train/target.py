"""The frozen target: its features, its lm_head, and what they tell about a head for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polybasic.chain.config import SUPPORTED_ROPE_TYPES
from polybasic.chain.errors import UserError
from polybasic.chain.reference_model import load_reference_model
from polybasic.chain.tokenizer import load_tokenizer
from polybasic.train.head import HeadShape


@dataclass(frozen=True)
class LmHead:
    """The target's output projection with Gemma's soft-capping of logits where it has one.

    Attributes:
        weight: [V, H], the target's own tensor.
        softcap: c in c * tanh(logits / c), or None.
    """

    weight: Tensor
    softcap: float | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V]."""
        logits = F.linear(states, self.weight)
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap

    def to(self, dtype: torch.dtype) -> "LmHead":
        """The same in another dtype; no copy where it has it already."""
        return LmHead(self.weight.to(dtype), self.softcap)


@dataclass(frozen=True)
class Target:
    """A loaded target in its own dtype; nothing of it is ever trained.

    Attributes:
        model: a causal language model with logits = lm_head(final norm(hidden state)).
        tokenizer: with a chat template.
        lm_head: shares the model's weight.
        embedding: [V, H], the model's own table, before any scaling of its rows.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    lm_head: LmHead
    embedding: Tensor

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.lm_head.weight.device

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of right-padded `token_ids` [B, T]."""
        return self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state

    def head_shape(self, intermediate_size: int | None) -> HeadShape:
        """The shape of a head for this target; its MLP's size is the target's unless given."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None)
        return HeadShape(
            vocab_size=self.embedding.shape[0],
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size or config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope=_rope(config),
            context_tokens=config.max_position_embeddings,
        )


def load_target(folder: Path, device: torch.device, tokenizer: Path | None = None) -> Target:
    """Load a transformers checkpoint with its tokenizer; code in the folder is never run.

    Args:
        folder: of the checkpoint.
        device: for its weights.
        tokenizer: folder of the tokenizer; default: `folder`.

    Raises:
        UserError: the folder is no causal language model, its logits are not
            lm_head(final norm(hidden state)), or its rotary scaling is one that heads lack.
    """
    model = load_reference_model(folder, "auto", device)
    return checked_target(model, load_tokenizer(tokenizer or folder, "target's tokenizer"), folder)


def checked_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Target:
    """Freeze a loaded model and find in it what a head needs.

    Raises:
        UserError: as `load_target`.
    """
    model.requires_grad_(False)
    lm_head = LmHead(
        _weight(model.get_output_embeddings()),
        getattr(model.config, "final_logit_softcapping", None),
    )
    _check_layout(model, lm_head, folder)
    return Target(model, tokenizer, lm_head, _weight(model.get_input_embeddings()))


@torch.no_grad()
def _check_layout(model: PreTrainedModel, lm_head: LmHead, folder: Path) -> None:
    config, described = model.config, f"{folder} (model_type {model.config.model_type})"
    rope = _full_attention_rope(config)
    if hasattr(model, "model") and hasattr(config, "rms_norm_eps") and "rope_theta" in rope:
        is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0
        if rope["rope_type"] not in SUPPORTED_ROPE_TYPES or is_partial:
            raise UserError(
                "unsupported rotary scaling",
                f"{described} {rope}",
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}, of heads that are rotated whole",
            )
        token_ids = torch.arange(8, device=model.device)[None] % config.vocab_size
        expected = model(input_ids=token_ids, use_cache=False).logits
        states = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        if torch.allclose(lm_head(states), expected, rtol=1e-2, atol=1e-2):
            return
    raise UserError(
        "target without the Llama family's layout",
        described,
        "use a model with RMS norms, rotary positions and logits = lm_head(final norm)",
    )


def _full_attention_rope(config: Any) -> dict[str, Any]:
    """Rotary parameters of the layers that see the whole context, where kinds of layers differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _rope(config: Any) -> dict[str, Any]:
    given = _full_attention_rope(config)
    return {
        name: value
        for name, value in given.items()
        if value is not None and name != "partial_rotary_factor"
    }


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
