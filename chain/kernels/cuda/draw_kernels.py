"""Draws from rows of probabilities, in Triton: `Operations.draw`.

The sums of chunks determine the chunk of a draw; only that chunk is read again. The order of
additions depends only on sizes, so that equal numbers give equal draws.

#   R = rows, V = vocabulary, C = chunks of a row
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_CHUNK = 1024
_MAX_CHUNKS = 128


@triton.jit
def sum_chunks(probabilities, stride, num_outputs, sums, CHUNK: tl.constexpr):
    """Grid: (C, R). sums: float32 [R, C]."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    outputs = chunk * CHUNK + tl.arange(0, CHUNK)
    given = probabilities + row.to(tl.int64) * stride + outputs
    own = tl.load(given, mask=outputs < num_outputs, other=0.0)
    tl.store(sums + row * tl.num_programs(0) + chunk, tl.sum(own, 0))


@triton.jit
def _found(weights, target, places):
    """Place where the running sum of weights passes the target, and the sum before that place.

    If rounding keeps the sum from passing it, that is the last place of a positive weight. A place
    without positive weight is returned only if there is no other.
    """
    cumulative = tl.cumsum(weights, 0)
    is_possible = weights > 0
    is_beyond = is_possible & (cumulative > target)
    last = tl.max(tl.where(is_possible, places, 0), 0)
    place = tl.min(tl.where(is_beyond, places, last), 0)
    return place, tl.sum(tl.where(places < place, weights, 0.0), 0)


@triton.jit
def draw_rows(
    probabilities, stride, num_outputs, sums, uniforms, drawn, num_chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (R,). uniforms: float32 [R]; drawn: int64 [R]."""
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    weights = tl.load(sums + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    target = tl.load(uniforms + row) * tl.sum(weights, 0)
    chunk, before = _found(weights, target, chunks)
    outputs = chunk * CHUNK + tl.arange(0, CHUNK)
    given = probabilities + row.to(tl.int64) * stride + outputs
    own = tl.load(given, mask=outputs < num_outputs, other=0.0)
    output, _ = _found(own, target - before, outputs)
    tl.store(drawn + row, output.to(tl.int64))


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """See `Operations.draw`; rows of probabilities are contiguous."""
    num_rows, num_outputs = probabilities.shape
    assert probabilities.dtype == torch.float32
    assert probabilities.stride(1) == uniforms.stride(0) == 1
    chunk = max(_MIN_CHUNK, triton.next_power_of_2(triton.cdiv(num_outputs, _MAX_CHUNKS)))
    num_chunks = triton.cdiv(num_outputs, chunk)
    sums = probabilities.new_empty(num_rows, num_chunks)
    drawn = probabilities.new_empty(num_rows, dtype=torch.int64)
    with torch.cuda.device_of(probabilities):
        sum_chunks[(num_chunks, num_rows)](
            probabilities, probabilities.stride(0), num_outputs, sums, CHUNK=chunk, num_warps=4
        )
        draw_rows[(num_rows,)](
            probabilities, probabilities.stride(0), num_outputs, sums, uniforms, drawn, num_chunks,
            CHUNKS=triton.next_power_of_2(num_chunks),
            CHUNK=chunk,
            num_warps=4,
        )  # fmt: skip
    return drawn
