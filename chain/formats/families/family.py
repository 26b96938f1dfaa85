"""What tells a family of decoders from others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
"""Projections that attention reads, by the last part of their names."""


def _none(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of decoders: a Llama but for what is said here.

    Functions take the config as transformers reads it, which completes what the file leaves out.

    Attributes:
        model_type: of its config.json. transformers knows it, or the module that holds the family
            registers config and model with transformers.
        fields: fields of a `DecoderConfig` that say how a layer computes; those that are left out
            have their defaults.
        layer_types: "full_attention" or "sliding_attention" of each layer, the latter over
            `sliding_window` tokens; None where all layers see all tokens.
        autoawq: autoawq's name of models with the same layers; None where 4-bit copies are not
            made.
    """

    model_type: str
    fields: Callable[[Any], dict[str, Any]] = _none
    layer_types: Callable[[Any], Sequence[str]] | None = None
    autoawq: str | None = None


def attention_biases(config: Any) -> tuple[str, ...]:
    """Projections of attention that have a bias, where `attention_bias` decides on all of them."""
    return (*ATTENTION_INPUTS, "o_proj") if config.attention_bias else ()


def listed(config: Any) -> Sequence[str]:
    """Types of layers as the config lists them."""
    types: Sequence[str] = config.layer_types
    return types


def all_alike(config: Any) -> Sequence[str]:
    """Types of layers that all have the window, if there is one."""
    name = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [name] * int(config.num_hidden_layers)
