"""Qwen2, Qwen2.5 and Qwen3."""

from typing import Any

from polybasic.chain.formats.families.family import QKV, Family, Read, as_listed, attention_biases


def _qwen3(read: Read) -> dict[str, Any]:
    return {"biased": attention_biases(read), "has_head_norms": True}


QWEN2 = Family("qwen2", lambda read: {"biased": QKV}, as_listed, autoawq="qwen2")
QWEN3 = Family("qwen3", _qwen3, as_listed, autoawq="qwen3")
