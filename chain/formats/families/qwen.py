"""Qwen2, Qwen2.5 and Qwen3."""

from typing import Any

from polybasic.chain.formats.families.family import QKV, Family, Read, attention_biases, listed_or

_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


def _qwen3(read: Read) -> dict[str, Any]:
    return {"biased": attention_biases(read), "has_head_norms": True}


def _has_window(read: Read, layer: int) -> bool:
    return read.sliding_window is not None and layer >= read.max_window_layers


QWEN2 = Family(
    "qwen2",
    lambda read: {"biased": QKV},
    listed_or(_has_window),
    autoawq="qwen2",
    defaults=_DEFAULTS,
)
QWEN3 = Family(
    "qwen3",
    _qwen3,
    listed_or(_has_window),
    autoawq="qwen3",
    defaults={**_DEFAULTS, "head_dim": 128},
)
