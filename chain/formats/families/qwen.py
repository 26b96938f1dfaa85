"""Qwen2, Qwen2.5 and Qwen3."""

from typing import Any

from polybasic.chain.formats.families.family import (
    ATTENTION_INPUTS,
    Family,
    attention_biases,
    listed,
)


def _qwen3(config: Any) -> dict[str, Any]:
    return {"biased": attention_biases(config), "has_head_norms": True}


QWEN2 = Family("qwen2", lambda config: {"biased": ATTENTION_INPUTS}, listed, autoawq="qwen2")
QWEN3 = Family("qwen3", _qwen3, listed, autoawq="qwen3")
