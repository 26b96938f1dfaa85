"""Gemma 2 and the text model of Gemma 3."""

from typing import Any

from polybasic.chain.formats.families.family import Family, Read, attention_biases, listed_or
from polybasic.chain.formats.families.reading import rope_by_layer_type

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": False,
}
_GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
}


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


GEMMA2 = Family(
    "gemma2",
    _gemma2,
    listed_or(lambda read, layer: layer % 2 == 0),
    autoawq="gemma2",
    defaults=_DEFAULTS,
)
GEMMA3 = Family(
    "gemma3_text",
    _gemma3,
    listed_or(lambda read, layer: (layer + 1) % read.sliding_window_pattern != 0),
    autoawq="gemma2",
    defaults=_GEMMA3_DEFAULTS,
    rope=rope_by_layer_type,
)
