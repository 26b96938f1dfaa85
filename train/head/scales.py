"""How large a verifier's states are, channel by channel.

Single channels of a model's states may be a thousand times as large as the others (Sun et al.,
arXiv 2402.17762). A distance between unscaled states is theirs alone then, and so is its gradient.

Shapes: H = hidden size, W = width of what a head reads, 3H of an EAGLE-3 head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polybasic.train.head.acceptance import HeldoutBatch
from polybasic.train.head.eagle2 import DraftHead

_LEAST = 0.01  # of the median channel: a channel that is nearly off is no measure of itself


class ChannelScales(NamedTuple):
    """Root mean squares over held-out tokens, float32."""

    states: Tensor
    """[H], of what the verifier's lm_head reads: a loss between states is taken in these units."""
    source: Tensor
    """[W], of what the head reads: the noise on it is given in these units."""


def channel_scales(head: DraftHead, batches: Sequence[HeldoutBatch]) -> ChannelScales:
    """The scales of a verifier's states over prompts and answers that are never trained on."""
    rows = [batch.is_token for batch in batches]
    states = [batch.features.states for batch in batches]
    source = [head.source(batch.features) for batch in batches]
    return ChannelScales(_root_mean_square(states, rows), _root_mean_square(source, rows))


def _root_mean_square(states: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """By channel, of those of [B, T, C] each that rows [B, T] mark."""
    squares = torch.cat(
        [some[chosen].float().square() for some, chosen in zip(states, rows, strict=True)]
    )
    found = squares.mean(dim=0).sqrt().cpu()
    return found.clamp(min=_LEAST * float(found.median()))
