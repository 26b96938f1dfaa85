"""Checkpoints of every family and of what configs may say beside it, and 4-bit copies of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE, quantization_config
from tests.checkpoints import FAMILIES

WINDOW = 24
"""Of the families that have one."""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": (
        "llama2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-yarn": ("llama2", {"rope_parameters": _YARN}),
    "qwen-yarn": ("qwen25", {"rope_parameters": _YARN | {"attention_factor": 1.3}}),
    "llama-biases": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "one-file": ("qwen3", {"num_shards": 1}),
}
CASES = {family: (family, {}) for family in FAMILIES} | VARIANTS
Folders = Callable[[str], Path]


def write_4bit(folder: Path, source: Path, group_size: int = GROUP_SIZE) -> None:
    """`folder`/awq: `source` in 4 bits by rounding to the nearest; `folder`/dense: that undone."""
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_tensors(source).items():
        if not name.endswith("_proj.weight"):
            packed[name] = dense[name] = tensor.float().clone()
            continue
        weight, prefix = round_to_nearest(tensor.float(), group_size), name.removesuffix(".weight")
        for part, stored in zip(("qweight", "qzeros", "scales"), weight.pack(), strict=True):
            packed[f"{prefix}.{part}"] = stored.contiguous()
        dense[name] = dequantize(weight)
    config = json.loads((source / "config.json").read_text())
    config_4bit = config | {"quantization_config": quantization_config(group_size)}
    for name, tensors, said in (("awq", packed, config_4bit), ("dense", dense, config)):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(said))
