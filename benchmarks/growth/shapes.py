"""Shapes that small chains are grown to, and what can be grown to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig


@dataclass(frozen=True)
class GrownShape:
    """Sizes to grow to; a model whose vocabulary is larger keeps it."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 0


SHAPES: Mapping[str, GrownShape] = {
    "gpu-7b": GrownShape(32, 4096, 11008, 32, 32, 128, 32000),
    "gpu-8b": GrownShape(32, 4096, 14336, 32, 8, 128, 128256),
}
"""Llama-2-7B's and Llama-3-8B's."""


def shape_named(name: str) -> GrownShape:
    """A shape by its name.

    Raises:
        UserError: there is none.
    """
    if name not in SHAPES:
        raise UserError("unknown shape", name, f"use one of {', '.join(SHAPES)}")
    return SHAPES[name]


def num_kv_copies(small: DecoderConfig, shape: GrownShape) -> int:
    """Copies of each of the small model's key/value heads, so that none serves too many queries."""
    served = shape.num_heads // shape.num_kv_heads
    return -(-(small.num_heads // small.num_kv_heads) // served)


def check_sizes(small: DecoderConfig, shape: GrownShape) -> None:
    """Check that a small model fits into a shape.

    Raises:
        UserError: the shape is too small in a dimension, its head size is not a multiple, or its
            vocabulary is larger at the same width.
    """
    for what, needed, available in (
        ("layers", small.num_layers, shape.num_layers),
        ("hidden_size", small.hidden_size, shape.hidden_size),
        ("intermediate_size", small.intermediate_size, shape.intermediate_size),
        ("key/value heads", small.num_kv_heads * num_kv_copies(small, shape), shape.num_kv_heads),
    ):
        if needed > available:
            raise UserError(
                "shape is too small to grow to",
                f"{what} {available}, {needed} needed",
                "choose a larger shape or a smaller model",
            )
    if shape.head_dim % small.head_dim:
        raise UserError(
            "heads cannot be grown",
            f"head size {small.head_dim} to {shape.head_dim}",
            "use a model whose head size divides the shape's",
        )
    if shape.vocab_size > small.vocab_size and shape.hidden_size == small.hidden_size:
        raise UserError(
            "vocabulary cannot grow without width",
            f"vocab_size {small.vocab_size} to {shape.vocab_size}, both of "
            f"hidden_size {shape.hidden_size}",
            "choose a wider shape",
        )


def check_family(config: dict[str, Any], decoder: DecoderConfig, where: str) -> None:
    """Check that a target is a Llama without extras.

    Args:
        config: content of its config.json.
        decoder: the same, read.
        where: its path.

    Raises:
        UserError: another family, or biases.
    """
    found = f"model_type {config['model_type']}"
    found += f", biases of {', '.join(decoder.biased)}" if decoder.biased else ""
    if found != "model_type llama":
        raise UserError(
            "only plain Llamas can be grown",
            f"{where} ({found})",
            "grow a chain of a Llama",
        )
