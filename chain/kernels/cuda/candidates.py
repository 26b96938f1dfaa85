"""Choosing among a model's outputs, in Triton: the best of each row of logits, and the next beam.

A row is cut into chunks, each searched by its own program; a second kernel searches their results.
Of equal numbers the first one is better.

#   R = rows, V = outputs of the model, C = chunks of a row, k = outputs wanted from each row
#   K = children of a row of a draft, H = hidden size, P = provisional rows of the cache
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from polybasic.chain.formats.plan import MAX_TOP_K
from polybasic.chain.kernels.cuda.products.kernels import wait_for_previous
from polybasic.chain.kernels.cuda.products.launch import early_launch
from polybasic.chain.kernels.torch.trees import Beam

MAX_BEST = MAX_TOP_K
"""Most outputs to search for: each takes one pass over the rest."""
_MIN_CHUNK = 1024
_MAX_CHUNKS = 64
_STATE_BLOCK = 512
_MIN_COLUMNS = 64

_LOWEST = tl.constexpr(-3.0e38)
"""Replaces minus infinity, which marks what was taken already, and NaN."""


@triton.jit
def comparable(x):
    """`x` without values that a search would confuse with numbers already taken."""
    return tl.where(x > _LOWEST, x, _LOWEST)


@triton.jit
def restored(x):
    """The argument of `comparable`, except for NaN."""
    return tl.where(x > _LOWEST, x, float("-inf"))


@triton.jit
def search_chunks(
    logits, stride, num_outputs, found, found_at, most, total,
    k: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """The best k of one chunk, and its part of the softmax. Grid: (C, R).

    found, found_at: float32 and int32 [R, C, k]; most, total: float32 [R, C], largest logit and
    sum of exp(logit - largest), or None.
    """
    if IS_EARLY:
        wait_for_previous()
    chunk, row = tl.program_id(0), tl.program_id(1)
    part = row * tl.num_programs(0) + chunk
    lanes = tl.arange(0, CHUNK)
    outputs = chunk * CHUNK + lanes
    is_output = outputs < num_outputs
    x = tl.load(logits + row.to(tl.int64) * stride + outputs, mask=is_output, other=0.0)
    x = tl.where(is_output, comparable(x.to(tl.float32)), float("-inf"))
    if most is not None:
        greatest = tl.max(x, 0)
        tl.store(most + part, greatest)
        tl.store(total + part, tl.sum(tl.exp(x - greatest), 0))
    for place in range(k):
        value, lane = tl.max(x, 0, return_indices=True)
        tl.store(found + part * k + place, value)
        tl.store(found_at + part * k + place, chunk * CHUNK + lane)
        x = tl.where(lanes == lane, float("-inf"), x)


@triton.jit
def merge_chunks(
    found, found_at, most, total, above, token_ids, scores, tokens, num_chunks, num_outputs,
    k: tl.constexpr, CHUNKS: tl.constexpr, FOUND: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """The best k of a row, from those of its chunks. Grid: (R,).

    most, total and scores, float32 [R, k], may be None; tokens: int64 [R, k]; above: float32 [R] or
    None; token_ids: int64 [V] or None.
    """
    if IS_EARLY:
        wait_for_previous()
    row = tl.program_id(0)
    log_total = 0.0
    before = 0.0
    if most is not None:
        parts = tl.arange(0, CHUNKS)
        is_part = parts < num_chunks
        peaks = tl.load(most + row * num_chunks + parts, mask=is_part, other=float("-inf"))
        totals = tl.load(total + row * num_chunks + parts, mask=is_part, other=0.0)
        peak = tl.max(peaks, 0)
        log_total = peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), 0))
    if above is not None:
        before = tl.load(above + row)
    lanes = tl.arange(0, FOUND)
    is_found = lanes < num_chunks * k
    first = row * num_chunks * k
    x = tl.load(found + first + lanes, mask=is_found, other=float("-inf"))
    for place in range(k):
        value, lane = tl.max(x, 0, return_indices=True)
        output = tl.minimum(tl.load(found_at + first + lane), num_outputs - 1).to(tl.int64)
        if scores is not None:
            # a child's score is never above its parent's
            score = before + tl.minimum(restored(value) - log_total, 0.0)
            tl.store(scores + row * k + place, score)
        if token_ids is not None:
            output = tl.load(token_ids + output)
        tl.store(tokens + row * k + place, output)
        x = tl.where(lanes == lane, float("-inf"), x)


@triton.jit
def take_beam(
    scores, tokens, states, visible,
    places, beam_scores, beam_tokens, beam_states, beam_visible, width, num_seen,
    K: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """The best K of K * K candidates. Grid: (blocks of a state,), each repeating the choice."""
    if IS_EARLY:
        wait_for_previous()
    block = tl.program_id(0)
    inner = block * BLOCK + tl.arange(0, BLOCK)
    is_inner = inner < width
    columns = tl.arange(0, COLUMNS)
    num_columns = num_seen + K
    lanes = tl.arange(0, CANDIDATES)
    is_candidate = lanes < K * K
    x = tl.load(scores + lanes, mask=is_candidate, other=0.0)
    x = tl.where(is_candidate, comparable(x), float("-inf"))
    for place in range(K):
        value, lane = tl.max(x, 0, return_indices=True)
        parent = lane // K
        state = tl.load(states + parent * width + inner, mask=is_inner)
        tl.store(beam_states + place * width + inner, state, mask=is_inner)
        if block == 0:
            tl.store(places + place, lane.to(tl.int64))
            tl.store(beam_scores + place, restored(value))
            tl.store(beam_tokens + place, tl.load(tokens + lane))
            above = visible + parent * num_seen + columns
            seen = tl.load(above, mask=columns < num_seen, other=0).to(tl.int32)
            seen = tl.where(columns == num_seen + place, 1, seen)
            row = beam_visible + place * num_columns + columns
            tl.store(row, seen != 0, mask=columns < num_columns)
        x = tl.where(lanes == lane, float("-inf"), x)


def continuations(
    logits: Tensor, k: int, above: Tensor | None, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `Operations.continuations`; k is at most `MAX_BEST`, rows of logits are contiguous."""
    scores = logits.new_empty(len(logits), k, dtype=torch.float32)
    tokens = _search(logits, k, scores, above, token_ids)
    return scores.flatten(), tokens.flatten()


def best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Operations.best`; k is at most `MAX_BEST`, and rows of logits are contiguous."""
    scores = logits.new_empty(len(logits), k, dtype=torch.float32)
    return scores, _search(logits, k, scores)


def most_probable(logits: Tensor) -> Tensor:
    """See `Operations.most_probable`; rows of logits are contiguous."""
    return _search(logits, 1).squeeze(1)


def next_beam(scores: Tensor, tokens: Tensor, states: Tensor, visible: Tensor) -> Beam:
    """See `Operations.next_beam`; of equal scores the first comes first."""
    (top_k, width), num_seen = states.shape, visible.shape[1]
    assert states.is_contiguous()
    assert visible.is_contiguous()
    beam = Beam(
        torch.empty_like(tokens[:top_k]),
        torch.empty_like(scores[:top_k]),
        torch.empty_like(tokens[:top_k]),
        torch.empty_like(states),
        visible.new_empty(top_k, num_seen + top_k),
    )
    candidates = triton.next_power_of_2(top_k**2)
    with torch.cuda.device_of(scores):
        take_beam[(triton.cdiv(width, _STATE_BLOCK),)](
            scores, tokens, states, visible, *beam, width, num_seen,
            K=top_k,
            CANDIDATES=candidates,
            BLOCK=_STATE_BLOCK,
            COLUMNS=max(_MIN_COLUMNS, triton.next_power_of_2(num_seen + top_k)),
            num_warps=_num_warps(candidates),
            **early_launch(scores.device),
        )  # fmt: skip
    return beam


def _search(
    logits: Tensor,
    k: int,
    scores: Tensor | None = None,
    above: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Tokens int64 [R, k] of the best; fills `scores` [R, k] if given."""
    num_rows, num_outputs = logits.shape
    assert 1 <= k <= min(MAX_BEST, num_outputs), f"the best {k} of {num_outputs}"
    assert logits.stride(1) == 1
    chunk = triton.next_power_of_2(triton.cdiv(num_outputs, _MAX_CHUNKS))
    chunk = max(_MIN_CHUNK, chunk)
    num_chunks = triton.cdiv(num_outputs, chunk)
    found = logits.new_empty(num_rows, num_chunks, k, dtype=torch.float32)
    found_at = torch.empty_like(found, dtype=torch.int32)
    most = None if scores is None else torch.empty_like(found[:, :, 0])
    total = None if scores is None else torch.empty_like(found[:, :, 0])
    tokens = logits.new_empty(num_rows, k, dtype=torch.int64)
    early = early_launch(logits.device)
    num_found = triton.next_power_of_2(num_chunks * k)
    with torch.cuda.device_of(logits):
        search_chunks[(num_chunks, num_rows)](
            logits, logits.stride(0), num_outputs, found, found_at, most, total,
            k=k,
            CHUNK=chunk,
            num_warps=_num_warps(chunk),
            **early,
        )  # fmt: skip
        merge_chunks[(num_rows,)](
            found, found_at, most, total, above, token_ids, scores, tokens, num_chunks, num_outputs,
            k=k,
            CHUNKS=triton.next_power_of_2(num_chunks),
            FOUND=num_found,
            num_warps=_num_warps(num_found),
            **early,
        )  # fmt: skip
    return tokens


def _num_warps(size: int) -> int:
    """Warps of a program that searches `size` numbers repeatedly; few wait less for each other."""
    return 1 if size <= 128 else 4 if size <= 2048 else 8
