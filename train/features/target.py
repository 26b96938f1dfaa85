"""The frozen target or its 4-bit copy: its features, its lm_head, the shape of a head for it.

Shapes: B = batch, T = tokens, H = hidden size, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import SUPPORTED_ROPE_TYPES
from polybasic.chain.formats.head_kinds.eagle3 import NORM_EACH, NORM_OUTPUT
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.model.dequantized import load_dequantized
from polybasic.chain.model.reference import load_reference_model
from polybasic.train.data.packing import positions_in_documents
from polybasic.train.features.head_shape import FeatureLayers, HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.settings import HeadSettings

_LOGIT_BYTES = 64 << 20  # at a time


@dataclass(frozen=True)
class Target:
    """A loaded target; nothing of it is ever trained.

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
    def features(
        self,
        token_ids: Tensor,
        document_ids: Tensor | None = None,
        feature_layers: FeatureLayers | None = None,
        num_top: int = 0,
    ) -> Features:
        """States of right-padded token ids.

        Args:
            token_ids: [B, T].
            document_ids: int64 [B, T], as `positions_in_documents` takes them. Tokens see their
                own conversation alone, and positions begin anew with each. None: a row is one
                conversation.
            feature_layers: of an EAGLE-3 head; None leaves `Features.layers` out.
            num_top: K, of the most probable next tokens; 0 leaves them out.
        """
        modules: Any = self.model.model.layers if feature_layers else ()
        of_layers = [modules[layer] for layer in feature_layers or ()]
        states, layers = self.states_with_inputs(of_layers, token_ids, document_ids)
        found = Features(states, torch.cat(layers, dim=-1) if layers else None)
        return replace(found, **self._top(states, num_top)) if num_top else found

    def _top(self, states: Tensor, num: int) -> dict[str, Tensor]:
        """The most probable next tokens, as `Features` has them; a chunk of logits at a time."""
        rows = max(1, _LOGIT_BYTES // (4 * len(self.lm_head.weight)))
        token_ids, log_probs = [], []
        for some in states.flatten(0, 1).split(rows):
            logits = self.lm_head(some).float()
            best, chosen = logits.topk(num)
            log_probs.append((best - logits.logsumexp(dim=-1, keepdim=True)).half())
            token_ids.append(chosen.int())
        shape = (*states.shape[:2], num)
        return {
            "top_token_ids": torch.cat(token_ids).view(shape),
            "top_log_probs": torch.cat(log_probs).view(shape),
        }

    @torch.no_grad()
    def states_with_inputs(
        self, modules: Sequence[nn.Module], token_ids: Tensor, document_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """States after the final norm [B, T, H], and what enters some of the model's modules,
        [B, T, ...] each; token and document ids as for `features`."""
        positions = None if document_ids is None else positions_in_documents(document_ids)
        inputs: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[module] = args[0]

        hooks = [module.register_forward_pre_hook(keep) for module in set(modules)]
        try:
            # transformers recognizes packed conversations by positions that begin anew
            states = self.model.model(
                input_ids=token_ids, position_ids=positions, use_cache=False
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return states, [inputs[module] for module in modules]

    def head_shape(self, settings: HeadSettings) -> HeadShape:
        """The shape of a random head for this target, over its whole vocabulary.

        Raises:
            UserError: `settings.feature_layers` or `exit_layer` that it does not have.
        """
        config = self.model.config
        head_dim = getattr(config, "head_dim", None)
        num_layers: int = config.num_hidden_layers
        is_exit = settings.kind == "early_exit"
        return HeadShape(
            vocab_size=self.embedding.shape[0],
            hidden_size=config.hidden_size,
            intermediate_size=settings.intermediate_size or config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope=_rope(config),
            context_tokens=config.max_position_embeddings,
            kind=settings.kind,
            feature_layers=_feature_layers(settings, num_layers),
            exit_layer=_exit_layer(settings, num_layers) if is_exit else 0,
            adapter_rank=settings.adapter_rank if is_exit or settings.kind == "steering" else 0,
            **_position_sizes(settings),
            variants=(NORM_EACH, NORM_OUTPUT) if settings.normed_features else (),
        )


def load_target(
    folder: Path,
    device: torch.device,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Target:
    """Load a transformers checkpoint with its tokenizer; code in the folder is never run.

    Args:
        folder: of the checkpoint.
        device: for its weights.
        tokenizer: folder of the tokenizer; default: `folder`.
        dtype: of its passes; default: as it is stored.

    Raises:
        UserError: the folder is no causal language model, its logits are not
            lm_head(final norm(hidden state)), or its rotary scaling is one that heads lack.
    """
    model = load_reference_model(folder, dtype or "auto", device)
    return checked_target(model, load_tokenizer(tokenizer or folder, "target's tokenizer"), folder)


def load_intermediate(
    folder: Path, tokenizer: Path, device: torch.device, dtype: torch.dtype
) -> Target:
    """Load a 4-bit copy of a target, dequantized, as one whose states a head can learn.

    Its embedding and output projection are the target's as the copy stores them, in float16.

    Args:
        folder: of an AutoAWQ checkpoint.
        tokenizer: folder of the tokenizer, with a chat template.
        device: for its weights, which lie there whole.
        dtype: of its passes.

    Raises:
        UserError: as `polybasic.chain.model.dequantized.load_dequantized`, or as `load_target`.
    """
    model = load_dequantized(folder, dtype, device)
    return checked_target(model, load_tokenizer(tokenizer, "target's tokenizer"), folder)


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


def _position_sizes(settings: HeadSettings) -> dict[str, Any]:
    """Of heads that give several positions at once, or have no layers."""
    if settings.kind in ("early_exit", "steering"):
        return {"num_layers": 0}
    if settings.drafts_by_place:
        return {"num_positions": settings.num_positions, "num_layers": 0, "num_blocks": 1}
    if settings.kind != "block":
        return {}
    return {
        "num_layers": settings.num_layers,
        "num_positions": settings.num_positions,
        "markov_rank": settings.markov_rank,
    }


def _feature_layers(settings: HeadSettings, num_layers: int) -> FeatureLayers | None:
    """The layers that a head reads: those wanted, else EAGLE-3's own choice."""
    if settings.kind == "early_exit":
        return (_exit_layer(settings, num_layers),)
    if settings.kind != "eagle3":
        return None
    if settings.feature_layers is None:
        if num_layers < 7:  # too few for three of them by the rule below
            return 0, num_layers // 2, num_layers - 1
        return 2, num_layers // 2, num_layers - 3
    if sorted(settings.feature_layers) != list(settings.feature_layers) or not all(
        0 <= layer < num_layers for layer in settings.feature_layers
    ):
        raise UserError(
            "feature layers that the target does not have in this order",
            f"train.feature_layers {list(settings.feature_layers)} of {num_layers} layers",
            f"name three of 0 .. {num_layers - 1}, ascending, or leave it null",
        )
    return settings.feature_layers


def _exit_layer(settings: HeadSettings, num_layers: int) -> int:
    """How many layers an early exit runs: as many as wanted, else an eighth."""
    wanted = settings.exit_layer or max(num_layers // 8, 1)
    if wanted >= num_layers:
        raise UserError(
            "early exit behind the last layer",
            f"train.exit_layer {wanted} of {num_layers} layers",
            f"use 1 to {num_layers - 1}" if num_layers > 1 else "train a head of another kind",
        )
    return wanted


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
