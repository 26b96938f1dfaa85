"""The most probable tokens that reach a share, in Triton: `Operations.without_tail`.

Nothing is sorted. A token's key is its probability's bits, then its place from the end, so that no
two are equal, and a token is kept if its key is at least the greatest key from which on all tokens
reach the share. A first pass finds the two of a few probabilities that it lies between, a second
one gathers the keys there, of which there are few (at most 1,024 are above 2**-10), and one program
a row searches these bit by bit.

Shares are added as whole numbers, so that the order of additions is free, and sums that several
programs add to are always the same.

#   R = rows, V = vocabulary, C = chunks of a row, L = levels
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from polybasic.chain.kernels.cuda.products.kernels import wait_for_previous
from polybasic.chain.kernels.cuda.products.launch import early_launch
from polybasic.chain.kernels.torch import operations

_CHUNK = 2048
_BLOCK = 2048
_COUNTERS = 8
_LEVELS = tl.constexpr(4)
"""Probabilities 2**-10, 2**-12, 2**-14 and 2**-16."""
_FIRST_LEVEL = tl.constexpr((127 - 10) << 23)
"""Bits of 2**-10."""
_LEVEL_STEP = tl.constexpr(2 << 23)
_SHARES = tl.constexpr(operations.SHARES)
_PROBABILITY_BITS = tl.constexpr(30)
"""Those of 1.0 and less."""


@triton.jit
def _shares(probabilities):
    """In whole units; 0 for NaN."""
    return (tl.where(probabilities >= 0, probabilities, 0.0) * _SHARES).to(tl.int64)


@triton.jit
def _wanted(top_p):
    return tl.maximum((tl.load(top_p) * _SHARES).to(tl.int64), 1)


@triton.jit
def _keys(probabilities, outputs, PLACE_BITS: tl.constexpr):
    """int64, greater for the more probable, and for the first of equal ones."""
    bits = probabilities.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (bits.to(tl.int64) << PLACE_BITS) | ((1 << PLACE_BITS) - 1 - outputs)


@triton.jit
def _bracket(sums, top_p):
    """The first level from which on tokens reach the share (L if there is none), and the shares of
    those above the level before it."""
    wanted = _wanted(top_p)
    levels = tl.arange(0, _LEVELS)
    reached = tl.load(sums + levels)
    level = tl.min(tl.where(reached >= wanted, levels, _LEVELS), 0)
    return level, tl.max(tl.where(levels < level, reached, 0), 0)


@triton.jit
def sum_levels(
    probabilities, stride, num_outputs, sums, counters, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr
):
    """Add a chunk's shares of tokens from each level on. Grid: (C, R).

    sums: int64 [R, counters], of which the first L are added to.
    """
    if IS_EARLY:
        wait_for_previous()
    row = tl.program_id(1)
    outputs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    given = probabilities + row.to(tl.int64) * stride + outputs
    own = tl.load(given, mask=outputs < num_outputs, other=0.0)
    bits, shares = own.to(tl.int32, bitcast=True), _shares(own)
    for level in tl.static_range(_LEVELS):
        is_above = bits >= _FIRST_LEVEL - level * _LEVEL_STEP
        tl.atomic_add(
            sums + row * counters + level, tl.sum(tl.where(is_above, shares, 0), 0), sem="relaxed"
        )


@triton.jit
def gather_keys(
    probabilities, stride, num_outputs, top_p, sums, counters, keys,
    PLACE_BITS: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Gather the keys of a row's tokens between two levels, in any order. Grid: (C, R).

    sums: int64 [R, counters]; the one after the levels counts the keys. keys: int64 [R, V].
    """
    if IS_EARLY:
        wait_for_previous()
    row = tl.program_id(1)
    outputs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_output = outputs < num_outputs
    given = probabilities + row.to(tl.int64) * stride + outputs
    own = tl.load(given, mask=is_output, other=0.0)
    level, _ = _bracket(sums + row * counters, top_p)
    bits = own.to(tl.int32, bitcast=True)
    lowest = tl.where(level < _LEVELS, level * -_LEVEL_STEP + _FIRST_LEVEL, 0)
    is_below = (level == 0) | (bits < (1 - level) * _LEVEL_STEP + _FIRST_LEVEL)
    is_between = is_output & (bits >= lowest) & is_below
    places = tl.cumsum(is_between.to(tl.int32), 0) - 1
    first = tl.atomic_add(sums + row * counters + _LEVELS, tl.max(places, 0) + 1, sem="relaxed")
    own_keys = _keys(own, outputs, PLACE_BITS)
    tl.store(keys + row.to(tl.int64) * num_outputs + first + places, own_keys, mask=is_between)


@triton.jit
def search_keys(
    keys, num_outputs, top_p, sums, counters, least,
    PLACE_BITS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """The least key of a row that is kept. Grid: (R,). least: int64 [R]."""
    if IS_EARLY:
        wait_for_previous()
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    count = tl.load(sums + row * counters + _LEVELS).to(tl.int32)
    _, above = _bracket(sums + row * counters, top_p)
    missing = _wanted(top_p) - above
    own = keys + row.to(tl.int64) * num_outputs
    first = tl.load(own + lanes, mask=lanes < count, other=-1)
    first_shares = _shares_of(first, PLACE_BITS)
    found = above * 0
    for step in range(_PROBABILITY_BITS + PLACE_BITS):
        tried = found | (tl.full([], 1, tl.int64) << (_PROBABILITY_BITS + PLACE_BITS - 1 - step))
        reached = tl.sum(tl.where(first >= tried, first_shares, 0), 0)
        for begin in range(BLOCK, count, BLOCK):
            more = tl.load(own + begin + lanes, mask=begin + lanes < count, other=-1)
            reached += tl.sum(tl.where(more >= tried, _shares_of(more, PLACE_BITS), 0), 0)
        found = tl.where(reached >= missing, tried, found)
    tl.store(least + row, found)


@triton.jit
def _shares_of(keys, PLACE_BITS: tl.constexpr):
    bits = (tl.maximum(keys, 0) >> PLACE_BITS).to(tl.int32)
    return _shares(bits.to(tl.float32, bitcast=True))


@triton.jit
def drop_tail(
    logits, probabilities, stride, num_outputs, least, out,
    PLACE_BITS: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Minus infinity in the place of tokens with lower keys. Grid: (C, R). out: [R, V]."""
    if IS_EARLY:
        wait_for_previous()
    row = tl.program_id(1)
    outputs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_output = outputs < num_outputs
    own = tl.load(probabilities + row.to(tl.int64) * stride + outputs, mask=is_output, other=0.0)
    first = row.to(tl.int64) * num_outputs
    x = tl.load(logits + first + outputs, mask=is_output, other=0.0)
    is_kept = _keys(own, outputs, PLACE_BITS) >= tl.load(least + row)
    tl.store(out + first + outputs, tl.where(is_kept, x, float("-inf")), mask=is_output)


def without_tail(logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
    """See `Operations.without_tail`; rows of probabilities are contiguous."""
    num_rows, num_outputs = probabilities.shape
    assert logits.dtype == probabilities.dtype == top_p.dtype == torch.float32
    assert top_p.numel() == 1
    assert logits.is_contiguous()
    assert probabilities.stride(1) == 1
    sums = torch.zeros(num_rows, _COUNTERS, dtype=torch.int64, device=logits.device)
    least = torch.empty_like(sums[:, 0])
    keys = torch.empty_like(probabilities, dtype=torch.int64)
    out = torch.empty_like(logits)
    given = probabilities, probabilities.stride(0), num_outputs
    place_bits = (num_outputs - 1).bit_length()
    grid, early = (triton.cdiv(num_outputs, _CHUNK), num_rows), early_launch(logits.device)
    in_chunks = {"CHUNK": _CHUNK, "num_warps": 4, **early}
    with torch.cuda.device_of(logits):
        sum_levels[grid](*given, sums, _COUNTERS, **in_chunks)
        gather_keys[grid](*given, top_p, sums, _COUNTERS, keys, PLACE_BITS=place_bits, **in_chunks)
        search_keys[(num_rows,)](
            keys, num_outputs, top_p, sums, _COUNTERS, least,
            PLACE_BITS=place_bits, BLOCK=_BLOCK, num_warps=8, **early,
        )  # fmt: skip
        drop_tail[grid](logits, *given, least, out, PLACE_BITS=place_bits, **in_chunks)
    return out
