"""What tells a family of decoders from others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polybasic.chain.formats.families.reading import one_rope

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
        defaults: keys of its config.json beside `reading.COMMON`, and those with another default;
            None leaves reading to transformers, which has to be imported for it.
        rope: its rotary parameters by config.json and a name for errors, without defaults of
            `rope_type`.
        rope_types: those that transformers computes for it; () are all that are supported here.
        spelled: its config.json by the keys that others have, of that and a name for errors.
    """

    model_type: str
    fields: Callable[[Read], dict[str, Any]] = lambda read: {}
    layer_types: Callable[[Read], Sequence[str]] | None = None
    autoawq: str | None = None
    defaults: Mapping[str, Any] | None = None
    rope: Callable[[Mapping[str, Any], str], dict[str, Any]] = one_rope
    rope_types: tuple[str, ...] = ()
    spelled: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda config, where: config


def attention_biases(read: Read) -> tuple[str, ...]:
    """Projections with a bias in families whose `attention_bias` decides on all four."""
    return (*QKV, "o_proj") if read.attention_bias else ()


def all_alike(read: Read) -> list[str]:
    """Types of layers that all have the window, if there is one."""
    name = "full_attention" if read.sliding_window is None else "sliding_attention"
    return [name] * int(read.num_hidden_layers)


def listed_or(has_window: Callable[[Read, int], bool]) -> Callable[[Read], list[str]]:
    """Types of layers as the config lists them, else by whether a layer has the window.

    Args:
        has_window: of a config and the number of a layer, from 0.
    """

    def types(read: Read) -> list[str]:
        if read.layer_types is not None:
            return list(read.layer_types)
        numbers = range(read.num_hidden_layers)
        return [
            "sliding_attention" if has_window(read, number) else "full_attention"
            for number in numbers
        ]

    return types
