"""Gemma 2 and the text model of Gemma 3."""

from typing import Any

from polybasic.chain.formats.families.family import Family, attention_biases, listed


def _both(config: Any) -> dict[str, Any]:
    return {
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "logit_softcap": config.final_logit_softcapping,
        "embedding_scale": config.hidden_size**0.5,
        "biased": attention_biases(config),
        "has_post_norms": True,
        "has_offset_norms": True,
    }


def _gemma2(config: Any) -> dict[str, Any]:
    return {**_both(config), "attention_softcap": config.attn_logit_softcapping}


def _gemma3(config: Any) -> dict[str, Any]:
    return {**_both(config), "has_head_norms": True}


GEMMA2 = Family("gemma2", _gemma2, listed, autoawq="gemma2")
GEMMA3 = Family("gemma3_text", _gemma3, listed, autoawq="gemma2")
