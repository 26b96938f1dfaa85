"""The weights that a head starts from, and those that it leaves: random, of a ready head, LoRA."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from polybasic.chain.checkpoint import load_tensors
from polybasic.chain.config import read_head_config
from polybasic.chain.errors import UserError
from polybasic.train.head import DraftHead, HeadShape
from polybasic.train.settings import HeadSettings, LoraSettings

_EMBEDDING = "embed_tokens.weight"
_MATRICES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FC_BIAS = "fc.bias"
_QKV_BIASES = tuple(f"layers.0.self_attn.{part}_proj.bias" for part in "qkv")
_ADAPTER = "default"  # peft's own name for the only one
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def new_head(
    shape: HeadShape,
    embedding: Tensor,
    settings: HeadSettings,
    seed: int,
    start: Path | None,
    lora: LoraSettings | None,
) -> DraftHead:
    """A head in float32 that embeds with the target's table.

    Args:
        shape: of a head for the target.
        embedding: [V, H], the target's; shared where its dtype is the settings'.
        settings: of the training.
        seed: of random weights, LoRA's included.
        start: folder of a ready head (config.json, model.safetensors or pytorch_model.bin), whose
            own attention, MLP size, rotary positions and biases are kept; default: random weights.
        lora: freeze the head and put a LoRA, which changes nothing yet, on each of its matrices.

    Raises:
        UserError: a ready head of another width or vocabulary than the target's, of another MLP
            size than `settings` ask for, or with other weights than an EAGLE-2 head has.
    """
    weights = None if start is None else _ready_weights(start)
    if start is not None and weights is not None:
        shape = _ready_shape(start, weights, shape, settings.intermediate_size)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(shape, embedding.to(_DTYPES[settings.dtype]))
        if start is not None and weights is not None:
            _take_weights(head, weights, start)
        if lora is not None:
            adapter = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # it is only divided by the rank
                target_modules=list(_MATRICES),
            )
            inject_adapter_in_model(adapter, head, _ADAPTER)
    return head


@torch.no_grad()
def trained_weights(head: DraftHead) -> dict[str, Tensor]:
    """What a head is served with, but for the embedding: copies on the CPU, LoRA merged.

    Names are EAGLE's; the dtype is the head's. The sum with a LoRA is taken in float32.
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


def _ready_weights(start: Path) -> dict[str, Tensor]:
    """A ready head's weights but its embedding, which is the target's, and biases of zeros."""
    weights = load_tensors(start)
    weights.pop(_EMBEDDING, None)
    for biases in ((_FC_BIAS,), _QKV_BIASES):
        stored = [name for name in biases if name in weights]
        if not any(weights[name].any() for name in stored):
            for name in stored:
                del weights[name]
    return weights


def _ready_shape(
    start: Path, weights: dict[str, Tensor], shape: HeadShape, intermediate_size: int | None
) -> HeadShape:
    config = read_head_config(start)
    wanted: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_layers": 1,
        "activation": "silu",
    }
    if intermediate_size is not None:
        wanted["intermediate_size"] = intermediate_size
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(
                "head does not fit its target",
                f"{start / 'config.json'} {name} {getattr(config, name)}, wanted {value}",
                "start from a head that was trained for this target or for its base",
            )
    return replace(
        shape,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        context_tokens=config.context_tokens,
        has_fc_bias=_FC_BIAS in weights,
        has_qkv_bias=any(name in weights for name in _QKV_BIASES),
    )


def _take_weights(head: DraftHead, weights: dict[str, Tensor], start: Path) -> None:
    expected = {name: tensor for name, tensor in head.state_dict().items() if name != _EMBEDDING}
    for name in sorted(expected.keys() ^ weights.keys()):
        raise UserError(
            "weight missing" if name in expected else "weight that no EAGLE-2 head has",
            f"{name} in {start}",
            "name a head in EAGLE-2's layout",
        )
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise UserError(
                "head's weight and config.json differ",
                f"{name} in {start} is {list(weights[name].shape)}, not {list(tensor.shape)}",
                "fetch or export the head again",
            )
        tensor.copy_(weights[name])
