"""Draft trees between the passes of a round, in PyTorch's operations.

All sizes follow from a draft's shape; no number is read by the host. Candidates are numbered as
`polybasic.deploy.drafters.expansion.Candidates` numbers them.

#   K = candidates below a row, L = levels, N = K + (L - 1) * K * K candidates, H = hidden size
#   P = provisional rows of the cache, R = rows of a tree, T = most tokens that a walk gains
#   S = stop tokens
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Beam(NamedTuple):
    """The best candidates of one level, which the next pass reads.

    Attributes:
        places: int64 [K] in the level, best first.
        scores: float32 [K].
        tokens: int64 [K].
        states: [K, H] of the rows that they hang below.
        visible: bool [K, P + K], provisional rows that each sees: those that its parent saw, and
            of the K that the pass writes its own.
    """

    places: Tensor
    scores: Tensor
    tokens: Tensor
    states: Tensor
    visible: Tensor


class Rows(NamedTuple):
    """Rows of a tree, root first, parents before children.

    Attributes:
        tokens: int64 [R].
        parents: int64 [R]; the root has 0.
        depths: int64 [R], distance from the root.
        ancestors: bool [R, R], which rows lie on the path to each, itself included.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor


class Walk(NamedTuple):
    """What a walk from the root gained.

    Attributes:
        path: int64 [T], accepted rows, root first; behind the first `num` they are rows of the
            tree as well, but mean nothing.
        gained: int64 [T], the token drawn behind each row of the path.
        num: int64 [], how many tokens are gained, at least one.
    """

    path: Tensor
    gained: Tensor
    num: Tensor


def next_beam(scores: Tensor, tokens: Tensor, states: Tensor, visible: Tensor) -> Beam:
    """The best K of a level's candidates; see `Operations.next_beam`."""
    top_k = len(states)
    best, places = scores.topk(top_k)
    parents = places // top_k
    itself = torch.eye(top_k, dtype=torch.bool, device=scores.device)
    visible = torch.cat([visible[parents], itself], 1)
    return Beam(places, best, tokens[places], states[parents], visible)


def keep_best(
    top_k: int, tokens: Tensor, scores: Tensor, beams: Tensor, root: Tensor, rows: int
) -> Rows:
    """The root and the best `rows - 1` candidates; see `Operations.keep_best`."""
    # The stable sort puts a parent before a child of equal score.
    best = scores.sort(descending=True, stable=True).indices
    chosen = best[: rows - 1].sort().values
    level = (chosen + top_k * (top_k - 1)) // top_k**2
    parents = torch.zeros_like(chosen)
    if len(beams):
        place = beams.flatten()[((chosen - top_k) // top_k).clamp(min=0)]
        parent = (top_k + (level - 2) * top_k**2).clamp(min=0) + place
        parents = torch.where(level > 0, 1 + torch.searchsorted(chosen, parent), 0)
    zero = root.new_zeros(1)
    parents = torch.cat([zero, parents])
    return Rows(
        torch.cat([root.view(1), tokens[chosen]]),
        parents,
        torch.cat([zero, level + 1]),
        ancestors(parents, min(len(beams) + 1, len(chosen))),
    )


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Which rows lie on the path to each, itself included: bool [R, R].

    Args:
        parents: int64 [R]; the root has 0.
        max_depth: no row lies deeper.
    """
    found = torch.eye(len(parents), dtype=torch.bool, device=parents.device)
    jumps, num_rows = parents, 1
    while num_rows <= max_depth:
        found = found | found[jumps]
        jumps, num_rows = jumps[jumps], 2 * num_rows
    return found


def walk(tree: Rows, drawn: Tensor, limit: Tensor, stop_tokens: Tensor, most: int) -> Walk:
    """Walk from the root by what was drawn; see `Operations.walk`."""
    rows = torch.arange(len(drawn), device=drawn.device)
    is_child = (tree.parents == rows[:, None]) & (tree.tokens == drawn[:, None])
    # 0 stands for none: the root is its own parent, but no row's child
    child = torch.where(is_child, rows, 0).amax(1)
    is_reached = (child[tree.parents] == rows) | (rows == 0)
    is_accepted = (is_reached | ~tree.ancestors).all(1)
    steps = torch.arange(most, device=drawn.device)
    is_step = is_accepted & (tree.depths == steps[:, None])
    path = torch.where(is_step, rows, 0).amax(1)
    gained = drawn[path]
    num = torch.minimum(is_accepted.sum(), limit)
    return Walk(path, gained, num_to_stop(gained, num, stop_tokens))


def num_to_stop(tokens: Tensor, num: Tensor, stop_tokens: Tensor) -> Tensor:
    """How many of the first `num` tokens stand up to the first stop token, itself included.

    Args:
        tokens: int64 [T].
        num: int64 [], at most T.
        stop_tokens: int64 [S]; may be none.

    Returns:
        int64 [].
    """
    if not len(stop_tokens):
        return num
    is_stop = (tokens[:, None] == stop_tokens).any(1)
    lengths = torch.arange(1, len(tokens) + 1, device=tokens.device)
    return torch.minimum(num, torch.where(is_stop, lengths, len(tokens)).amin())
