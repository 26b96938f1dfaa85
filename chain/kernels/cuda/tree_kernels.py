"""Draft trees between the passes of a round, in Triton: as `polybasic.chain.kernels.torch.trees`.

Each is a single program, since the number of launches is what costs time on a GPU.

#   K = children of a row, L = levels, N = K + (L - 1) * K * K candidates
#   R = rows of a tree, T = most tokens of a walk, S = stop tokens
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from polybasic.chain.kernels.cuda.candidates import comparable
from polybasic.chain.kernels.torch.trees import DeviceTree, Walk

MAX_ROWS = 64
"""Most rows of a tree: its program compares every row with every other."""
MAX_CANDIDATES = 8192

_NO_CANDIDATE = tl.constexpr(1 << 30)


@triton.jit
def _above(candidates, beams, K: tl.constexpr):
    """Numbers of the parents of these candidates; -1 is the root."""
    is_below = candidates >= K
    place = tl.load(beams + (candidates - K) // K, mask=is_below, other=0).to(tl.int32)
    level = (candidates + K * (K - 1)) // (K * K)
    first = tl.maximum(K + (level - 2) * (K * K), 0)
    return tl.where(is_below, first + place, -1)


@triton.jit
def keep_rows(
    tokens, scores, beams, root, row_tokens, parents, depths, ancestors, num_candidates, num_rows,
    K: tl.constexpr, LEVELS: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The root and the best `num_rows - 1` candidates. Grid: (1,)."""
    lanes = tl.arange(0, CANDIDATES)
    is_candidate = lanes < num_candidates
    x = tl.load(scores + lanes, mask=is_candidate, other=0.0)
    x = tl.where(is_candidate, comparable(x), float("-inf"))
    # slots hold candidates, best first; the root, in the first, has the least number
    slots = tl.arange(0, ROWS)
    chosen = tl.where(slots == 0, -1, _NO_CANDIDATE)
    for slot in range(1, num_rows):
        _, lane = tl.max(x, 0, return_indices=True)
        chosen = tl.where(slots == slot, lane, chosen)
        x = tl.where(lanes == lane, float("-inf"), x)
    is_row = slots < num_rows
    row = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1)
    current = tl.where(is_row, chosen, -1)
    above = _above(current, beams, K)
    parent = tl.sum((chosen[None, :] < above[:, None]).to(tl.int32), 1)
    level = (current + K * (K - 1)) // (K * K)
    token = tl.load(tokens + current, mask=current >= 0, other=0)
    token = tl.where(slots == 0, tl.load(root), token)
    tl.store(row_tokens + row, token, mask=is_row)
    tl.store(parents + row, parent.to(tl.int64), mask=is_row)
    tl.store(depths + row, tl.where(current < 0, 0, level + 1).to(tl.int64), mask=is_row)
    on_path = chosen[None, :] == current[:, None]
    for _ in range(LEVELS):
        current = _above(current, beams, K)
        on_path = on_path | (chosen[None, :] == current[:, None])
    column = tl.sum((chosen[:, None] < chosen[None, :]).to(tl.int32), 0)
    is_inside = is_row[:, None] & (tl.arange(0, ROWS) < num_rows)[None, :]
    tl.store(ancestors + row[:, None] * num_rows + column[None, :], on_path, mask=is_inside)


@triton.jit
def walk_rows(
    tokens, parents, drawn, limit, stop_tokens, path, gained, num, num_rows, num_stops,
    MOST: tl.constexpr, ROWS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Walk from the root, row by row. Grid: (1,)."""
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    token = tl.load(tokens + rows, mask=is_row, other=-1)
    draw = tl.load(drawn + rows, mask=is_row, other=-1)
    parent = tl.load(parents + rows, mask=is_row, other=-1).to(tl.int32)
    stops = tl.arange(0, STOPS)
    stop = tl.load(stop_tokens + stops, mask=stops < num_stops, other=-1)
    most = tl.load(limit).to(tl.int32)
    row = tl.min(rows, 0)
    count, is_walking = row, row + 1
    for step in range(MOST):
        next_token = tl.sum(tl.where(rows == row, draw, 0), 0)
        tl.store(path + step, row.to(tl.int64))
        tl.store(gained + step, next_token)
        count += is_walking
        # 0 means none: the root is its own parent, but never a child
        child = tl.max(tl.where((parent == row) & (token == next_token), rows, 0), 0)
        is_stopped = tl.max((stop == next_token).to(tl.int32), 0)
        goes_on = (child > 0) & (is_stopped == 0) & (count < most)
        is_walking = tl.where(goes_on, is_walking, 0)
        row = tl.where(is_walking > 0, child, row)
    tl.store(num, count.to(tl.int64))


def keep_best(
    top_k: int, tokens: Tensor, scores: Tensor, beams: Tensor, root: Tensor, rows: int
) -> DeviceTree:
    """See `Operations.keep_best`; at most `MAX_ROWS` of at most `MAX_CANDIDATES`."""
    num_candidates = len(tokens)
    num_rows = min(rows, num_candidates + 1)
    assert num_rows <= MAX_ROWS, f"{num_rows} rows"
    assert num_candidates <= MAX_CANDIDATES, f"{num_candidates} candidates"
    numbers = torch.empty(3, num_rows, dtype=torch.int64, device=tokens.device)
    ancestors = numbers.new_empty(num_rows, num_rows, dtype=torch.bool)
    kept = DeviceTree(numbers[0], numbers[1], numbers[2], ancestors)
    with torch.cuda.device_of(tokens):
        keep_rows[(1,)](
            tokens, scores, beams, root, *kept, num_candidates, num_rows,
            K=top_k,
            LEVELS=len(beams) + 1,
            CANDIDATES=triton.next_power_of_2(num_candidates),
            ROWS=triton.next_power_of_2(num_rows),
            num_warps=4 if num_candidates <= 2048 else 8,
        )  # fmt: skip
    return kept


def walk(
    tree: DeviceTree, drawn: Tensor, limit: Tensor, stop_tokens: Tensor, max_tokens: int
) -> Walk:
    """See `Operations.walk`."""
    numbers = torch.empty(2 * max_tokens + 1, dtype=torch.int64, device=drawn.device)
    walked = Walk(
        numbers[:max_tokens], numbers[max_tokens : 2 * max_tokens], numbers[2 * max_tokens]
    )
    with torch.cuda.device_of(tree.tokens):
        walk_rows[(1,)](
            tree.tokens, tree.parents, drawn, limit, stop_tokens, *walked, len(drawn),
            len(stop_tokens),
            MOST=max_tokens,
            ROWS=triton.next_power_of_2(len(drawn)),
            STOPS=triton.next_power_of_2(max(1, len(stop_tokens))),
            num_warps=1,
        )  # fmt: skip
    return walked
