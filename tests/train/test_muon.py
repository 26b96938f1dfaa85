"""Muon in bfloat16 is PyTorch's own, bit for bit; in float32 it is nearer to what it computes."""

import pytest
import torch
from torch import Tensor, nn

from polybasic.train.muon import Muon, orthogonalized

SHAPES = ((24, 24), (40, 16), (16, 40))


def steps(make: type[torch.optim.Optimizer], **options: object) -> list[Tensor]:
    """The matrices after three steps, one of which leaves a matrix without a gradient."""
    draw = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    optimizer = make(matrices, lr=0.1, momentum=0.9, weight_decay=0.05, **options)
    for step in range(3):
        for index, matrix in enumerate(matrices):
            gradient = torch.randn(matrix.shape, generator=draw)
            matrix.grad = None if step == index == 1 else gradient
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def test_in_bfloat16_it_is_pytorchs_own() -> None:
    expected = steps(torch.optim.Muon, ns_steps=3)
    in_bfloat16, in_float32 = (
        steps(Muon, num_iterations=3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    for own, found, finer in zip(expected, in_bfloat16, in_float32, strict=True):
        assert torch.equal(found, own)
        assert not torch.equal(finer, own)
        torch.testing.assert_close(finer, own, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalized(matrix[None], 5)[0])
    assert values.max() / values.min() < 2.5
    assert 0.5 < values.min() < values.max() < 1.5
    assert torch.linalg.cond(matrix) > 3
