"""Llama 2 and 3, Vicuna."""

from typing import Any

from polybasic.chain.formats.families.family import Family, attention_biases


def _fields(config: Any) -> dict[str, Any]:
    mlp = ("gate_proj", "up_proj", "down_proj") if config.mlp_bias else ()
    return {"biased": attention_biases(config) + mlp}


LLAMA = Family("llama", _fields, autoawq="llama")
