"""Sizes of a draft head and what of its verifier it reads."""

from dataclasses import dataclass
from typing import Any

FeatureLayers = tuple[int, int, int]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; a random one has the target's, all but `intermediate_size`.

    Attributes:
        vocab_size: of the target, whose tokens a head reads.
        rope: rotary parameters as transformers names them (rope_type, rope_theta, factor, ...).
        context_tokens: positions that the target is declared for.
        has_fc_bias: EAGLE-2 heads of others may have one.
        has_qkv_bias: on queries, keys and values; heads of others may have them.
        kind: EAGLE-2's or EAGLE-3's layout.
        feature_layers: of an EAGLE-3 head: the verifier's layers whose inputs it reads.
        draft_vocab_size: tokens that it drafts among; None for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    context_tokens: int
    has_fc_bias: bool = False
    has_qkv_bias: bool = False
    kind: str = "eagle2"
    feature_layers: FeatureLayers | None = None
    draft_vocab_size: int | None = None
