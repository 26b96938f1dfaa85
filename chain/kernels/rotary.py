"""Rotary positions: frequencies, and tables of cosines and sines."""

from typing import Any

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of some positions, each [R, 1, H]."""


class RotaryTable:
    """Cosines and signed sines of every position for each kind of layer, in the compute dtype.

    Rotating x is x * cos + roll(x, H/2) * sin, with the sign of the rotated half kept in `sin`.
    """

    def __init__(
        self, config: DecoderConfig, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(num_positions).float()
        self.tables: list[Rotation] = []
        for number, kind in enumerate(config.kinds):
            ropes = [earlier.rope for earlier in config.kinds[:number]]
            if kind.rope in ropes:
                self.tables.append(self.tables[ropes.index(kind.rope)])
                continue
            frequency, scaling = inverse_frequency(
                kind.rope, config.head_dim, config.context_tokens
            )
            angle = torch.outer(positions, frequency)
            sin, cos = angle.sin() * scaling, angle.cos() * scaling
            self.tables.append(
                (
                    torch.cat([cos, cos], -1).unsqueeze(1).to(device, dtype),
                    torch.cat([-sin, sin], -1).unsqueeze(1).to(device, dtype),
                )
            )

    def at(self, positions: Tensor) -> list[Rotation]:
        """Rotations by `positions` [R], one for each kind of layer."""
        return [(cos[positions], sin[positions]) for cos, sin in self.tables]

    def between(self, first: int, end: int) -> list[Rotation]:
        """Rotations of positions `first` to `end` - 1, one for each kind of layer; views."""
        return [(cos[first:end], sin[first:end]) for cos, sin in self.tables]


def inverse_frequency(
    rope: dict[str, Any], head_dim: int, context_tokens: int
) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2] and the factor of cosines and sines.

    Args:
        rope: as transformers 5 names rope_parameters; rope_type default, linear, llama3 or yarn.
        head_dim: size of a head.
        context_tokens: the model's number of positions.
    """
    if rope["rope_type"] == "default":
        exponent = torch.arange(0, head_dim, 2).float() / head_dim
        return rope["rope_theta"] ** -exponent, 1.0
    # imported where it computes, for its import takes a second
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    described = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=context_tokens,
        rope_parameters=dict(rope),
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](described, torch.device("cpu"))
