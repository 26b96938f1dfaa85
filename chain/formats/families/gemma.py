"""Gemma 2 and the text model of Gemma 3."""

from typing import Any

from polybasic.chain.formats.families.family import Family, Read, as_listed, attention_biases


def _gemma(read: Read) -> dict[str, Any]:
    return {
        "attention_scale": read.query_pre_attn_scalar**-0.5,
        "logit_softcap": read.final_logit_softcapping,
        "embedding_scale": read.hidden_size**0.5,
        "biased": attention_biases(read),
        "has_post_norms": True,
        "has_offset_norms": True,
    }


def _gemma2(read: Read) -> dict[str, Any]:
    return {**_gemma(read), "attention_softcap": read.attn_logit_softcapping}


def _gemma3(read: Read) -> dict[str, Any]:
    return {**_gemma(read), "has_head_norms": True}


GEMMA2 = Family("gemma2", _gemma2, as_listed, autoawq="gemma2")
GEMMA3 = Family("gemma3_text", _gemma3, as_listed, autoawq="gemma2")
