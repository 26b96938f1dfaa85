"""Llama 2 and 3, Vicuna."""

from typing import Any

from polybasic.chain.formats.families.family import Family, Read, attention_biases


def _llama(read: Read) -> dict[str, Any]:
    mlp = ("gate_proj", "up_proj", "down_proj") if read.mlp_bias else ()
    return {"biased": attention_biases(read) + mlp}


LLAMA = Family("llama", _llama, autoawq="llama", defaults={})
