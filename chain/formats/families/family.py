"""What tells a family of decoders from others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

QKV = ("q_proj", "k_proj", "v_proj")
Read = Any
"""A config.json as transformers reads it, which completes what the file leaves out."""


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        model_type: of its config.json. transformers knows it, or the module that holds this record
            registers the family's config and model with transformers.
        fields: those fields of a `DecoderConfig` that differ from their defaults, beside sizes,
            activation, rotary parameters and kinds of layers.
        layer_types: "full_attention" or "sliding_attention" of each layer, the latter over
            `sliding_window` tokens; None where all layers see all tokens.
        autoawq: autoawq's name of models with the same layers; None where 4-bit copies are not
            made.
    """

    model_type: str
    fields: Callable[[Read], dict[str, Any]] = lambda read: {}
    layer_types: Callable[[Read], Sequence[str]] | None = None
    autoawq: str | None = None


def attention_biases(read: Read) -> tuple[str, ...]:
    """Projections with a bias in families whose `attention_bias` decides on all four."""
    return (*QKV, "o_proj") if read.attention_bias else ()


def all_alike(read: Read) -> list[str]:
    """Types of layers that all have the window, if there is one."""
    name = "full_attention" if read.sliding_window is None else "sliding_attention"
    return [name] * int(read.num_hidden_layers)


def as_listed(read: Read) -> list[str]:
    """Types of layers as the config lists them."""
    return list(read.layer_types)
