"""The weights that a head starts from, and those that it leaves: random, of a ready head, LoRA."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import IS_DRAFTED, OFFSETS
from polybasic.chain.formats.checkpoints.draft_vocabulary import (
    draft_token_ids as stored_draft_token_ids,
)
from polybasic.chain.formats.head_kinds.eagle3 import variants_of
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.head.block import BlockHead
from polybasic.train.head.eagle2 import DraftHead, Eagle2Head
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.early_exit import EarlyExit
from polybasic.train.head.medusa import HydraHead, MedusaHead
from polybasic.train.head.steering import Steering
from polybasic.train.settings import HeadSettings, LoraSettings

_EMBEDDING = "embed_tokens.weight"
_MATRICES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FC_BIAS = "fc.bias"
_QKV_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
_OUT = ("lm_head.weight", "lm_heads.")  # of heads with projections of their own
_BLOCKS = r"blocks\.\d+\.(layers\.\d+|residual)"  # of Medusa's and Hydra's heads
_MENDED_BY = {
    "kind": "set train.kind to the ready head's",
    **{
        name: f"set train.{name} to the ready head's"
        for name in ("feature_layers", "num_layers", "num_positions", "markov_rank")
    },
}
_CLASSES: dict[str, type[DraftHead]] = {
    "eagle2": Eagle2Head,
    "eagle3": Eagle3Head,
    "block": BlockHead,
    "early_exit": EarlyExit,
    "steering": Steering,
    "medusa": MedusaHead,
    "hydra": HydraHead,
}
_ADAPTER = "default"  # peft's own name for the only one


def new_head(
    shape: HeadShape,
    embedding: Tensor,
    settings: HeadSettings,
    seed: int,
    start: Path | None,
    lora: LoraSettings | None,
    lm_head: LmHead | None = None,
    draft_token_ids: Tensor | None = None,
) -> DraftHead:
    """A head in float32 that embeds with the target's table.

    Args:
        shape: of a head for the target.
        embedding: [V, H], the target's; shared where its dtype is the settings'.
        settings: of the training, settled.
        seed: of random weights, LoRA's included.
        start: folder of a ready head (config.json, model.safetensors or pytorch_model.bin), whose
            own attention, MLP size, rotary positions, biases and draft vocabulary are kept;
            default: random weights.
        lora: freeze the head and put a LoRA, which changes nothing yet, on each of its matrices
            (not on an output projection of its own).
        lm_head: the verifier's, from whose rows output projections of a random head start;
            default: random.
        draft_token_ids: int64 [V'], ascending, for a head that drafts among these alone. A ready
            head that drafts among as many keeps its own, as it does where the settings name a
            share or nothing.

    Raises:
        UserError: a ready head of another kind, width or vocabulary than the target's, of another
            MLP size, other feature layers or fewer draft tokens than `settings` ask for, or with
            other weights than a head of its kind has.
    """
    ready = None if start is None else _ready(start, shape, settings, draft_token_ids)
    if ready is not None:
        shape, draft_token_ids = ready.shape, ready.draft_token_ids
    elif draft_token_ids is not None:
        shape = replace(shape, draft_vocab_size=len(draft_token_ids))
    head_class = _CLASSES[shape.kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = head_class(shape, embedding.to(DTYPES[settings.dtype]), draft_token_ids)
        if ready is not None:
            _take_weights(head, ready)
        elif lm_head is not None:
            rows = slice(None) if draft_token_ids is None else draft_token_ids
            for name, parameter in head.named_parameters():
                if name.startswith(_OUT):
                    parameter.detach().copy_(lm_head.weight[rows])
        if lora is not None and isinstance(head, EarlyExit | Steering):
            raise UserError(
                f"{HEAD_KINDS[shape.kind].title} is of low rank itself",
                f"draft.adapt: lora for {start}",
                "train it whole, with train.adapter_rank",
            )
        if lora is not None:
            adapter = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # it is only divided by the rank
                target_modules=_BLOCKS if isinstance(head, MedusaHead) else list(_MATRICES),
            )
            inject_adapter_in_model(adapter, head, _ADAPTER)
    return head


@torch.no_grad()
def trained_weights(head: DraftHead) -> dict[str, Tensor]:
    """What a head is served with, but for the embedding: copies on the CPU, LoRA merged.

    Names are those of the head's kind, the dtype is the head's. The sum with a LoRA is taken in
    float32.
    """
    weights = {
        name.replace(".base_layer.", "."): parameter.to("cpu", copy=True).contiguous()
        for name, parameter in head.named_parameters()
        if name != _EMBEDDING and ".lora_" not in name
    }
    for name, module in head.named_modules():
        if isinstance(module, LoraLinear):
            weight = weights[f"{name}.weight"]
            update = module.get_delta_weight(_ADAPTER).to("cpu", torch.float32)
            weights[f"{name}.weight"] = (weight.float() + update).to(weight.dtype)
    return weights


@dataclass(frozen=True)
class _Ready:
    """A ready head as far as it is kept."""

    folder: Path
    shape: HeadShape
    draft_token_ids: Tensor | None
    weights: dict[str, Tensor]


def _ready(
    start: Path, shape: HeadShape, settings: HeadSettings, draft_token_ids: Tensor | None
) -> _Ready:
    weights = load_tensors(start)
    own_token_ids = stored_draft_token_ids(weights, str(start))
    for name in (_EMBEDDING, OFFSETS, IS_DRAFTED):
        weights.pop(name, None)
    _drop_biases_of_zeros(weights)
    config = read_config(start).head
    _check_fit(start, config, shape, settings)
    wanted = settings.draft_vocab_size
    is_any = wanted is None or wanted < 1
    if own_token_ids is not None and (is_any or wanted == len(own_token_ids)):
        draft_token_ids = own_token_ids
    elif draft_token_ids is not None and HEAD_KINDS[config.kind].has_lm_head:
        if own_token_ids is not None:
            raise UserError(
                "ready head has another draft vocabulary",
                f"{start} drafts {len(own_token_ids)} tokens, train.draft_vocab_size {wanted}",
                "leave train.draft_vocab_size null, which keeps the head's own",
            )
        for name in weights:
            if name.startswith(_OUT):
                weights[name] = weights[name][draft_token_ids]
    ready_shape = replace(
        shape,
        **_layer_sizes(config, weights),
        draft_vocab_size=None if draft_token_ids is None else len(draft_token_ids),
        num_blocks=config.num_blocks,
        variants=variants_of(config),
    )
    return _Ready(start, ready_shape, draft_token_ids, weights)


def _layer_sizes(config: HeadConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Of the layers of a ready head, as a shape has them; nothing of one without layers."""
    layers = HEAD_KINDS[config.kind].layers(config)
    if not layers:
        return {}
    return {
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": config.rope,
        "context_tokens": config.context_tokens,
        "has_fc_bias": _FC_BIAS in weights,
        "has_qkv_bias": any(f"{layers[0]}.{name}" in weights for name in _QKV_BIASES),
    }


def _drop_biases_of_zeros(weights: dict[str, Tensor]) -> None:
    for biases in ((_FC_BIAS,), _QKV_BIASES):
        stored = [name for name in weights if name.endswith(biases)]
        if not any(weights[name].any() for name in stored):
            for name in stored:
                del weights[name]


def _check_fit(start: Path, config: HeadConfig, shape: HeadShape, settings: HeadSettings) -> None:
    wanted: dict[str, Any] = {
        "kind": shape.kind,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_layers": shape.num_layers,
        "num_positions": shape.num_positions,
        "markov_rank": shape.markov_rank,
        "activation": "silu",
        "feature_layers": () if shape.exit_layer else shape.feature_layers or (),
        "exit_layer": shape.exit_layer,
        "adapter_rank": shape.adapter_rank,
    }
    if settings.intermediate_size is not None:
        wanted["intermediate_size"] = settings.intermediate_size
    for name, value in wanted.items():
        if (found := getattr(config, name)) != value:
            raise UserError(
                "head does not fit its target",
                f"{start / 'config.json'} {name} {found}, wanted {value}",
                _MENDED_BY.get(
                    name, "start from a head that was trained for this target or for its base"
                ),
            )


def _take_weights(head: DraftHead, ready: _Ready) -> None:
    expected = {name: tensor for name, tensor in head.state_dict().items() if name != _EMBEDDING}
    weights, kind = ready.weights, HEAD_KINDS[head.shape.kind].title
    for name in sorted(expected.keys() ^ weights.keys()):
        raise UserError(
            "weight missing" if name in expected else f"weight that no {kind} head has",
            f"{name} in {ready.folder}",
            f"name a head in {kind}'s layout",
        )
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise UserError(
                "head's weight and config.json differ",
                f"{name} in {ready.folder} is {list(weights[name].shape)}, "
                f"not {list(tensor.shape)}",
                "fetch or export the head again",
            )
        tensor.copy_(weights[name])
