"""Units of a verifier's states."""

from dataclasses import replace

import torch
from torch import Tensor

from polybasic.train.features.states import Features
from polybasic.train.head.acceptance import HeldoutBatch
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.scales import channel_scales
from tests.train.counting import SMALL_SHAPE


def batch(states: Tensor, layers: Tensor, lengths: list[int]) -> HeldoutBatch:
    token_ids = torch.zeros(states.shape[:2], dtype=torch.long)
    ends = torch.tensor(lengths)
    return HeldoutBatch(token_ids, Features(states, layers), ends - 1, ends, ["other"] * len(ends))


def test_root_mean_squares_of_tokens_by_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.ones(32)
    sizes[3], sizes[5] = 1000.0, 0.0
    parts = [torch.randn(2, length, 32, generator=generator) * sizes for length in (6, 9)]
    lengths = [[6, 2], [9, 4]]
    for states, ends in zip(parts, lengths, strict=True):
        states[1, ends[1] :] = 1e6  # of the padding
    batches = [
        batch(states, states.repeat(1, 1, 3), ends)
        for states, ends in zip(parts, lengths, strict=True)
    ]
    rows = [states[row, :end] for states, ends in zip(parts, lengths, strict=True)
            for row, end in enumerate(ends)]  # fmt: skip
    expected = torch.cat(rows).square().mean(0).sqrt()
    found = channel_scales(Eagle2Head(SMALL_SHAPE), batches)
    assert expected[3] > 100
    is_closed = torch.arange(32) == 5
    torch.testing.assert_close(found.states[~is_closed], expected[~is_closed])
    assert 0 < found.states[5] < 0.02, "a channel that is nothing is no unit"
    assert torch.equal(found.source, found.states)


def test_each_kind_has_units_of_what_it_reads() -> None:
    states, layers = torch.ones(1, 4, 32), 3 * torch.ones(1, 4, 96)
    head = Eagle3Head(replace(SMALL_SHAPE, kind="eagle3", feature_layers=(0, 1, 2)))
    found = channel_scales(head, [batch(states, layers, [4])])
    assert torch.equal(found.states, torch.ones(32))
    assert torch.equal(found.source, 3 * torch.ones(96))
