"""Draft trees between the passes of a round, in PyTorch's operations.

All sizes follow from a draft's shape; the host reads no number. Candidates are numbered as in
`polybasic.chain.kernels.drafts.Candidates`.

#   K = children of a row, L = levels, N = K + (L - 1) * K * K candidates, H = hidden size
#   P = provisional rows of the cache, R = rows of a tree, T = most tokens of a walk
#   S = stop tokens
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polybasic.chain.kernels.drafts import DraftTree


class Beam(NamedTuple):
    """The best candidates of one level, which the next pass reads.

    Attributes:
        places: int64 [K] in the level, best first.
        scores: float32 [K].
        tokens: int64 [K].
        states: [K, H] of their parents' rows.
        visible: bool [K, P + K], provisional rows that each sees: those that its parent saw, and
            its own among the K rows that the pass writes.
    """

    places: Tensor
    scores: Tensor
    tokens: Tensor
    states: Tensor
    visible: Tensor


class DeviceTree(NamedTuple):
    """Rows of a tree, root first, parents before children.

    Attributes:
        tokens: int64 [R].
        parents: int64 [R]; the root has 0.
        depths: int64 [R], distance from the root.
        ancestors: bool [R, R], which rows are on the path to each, itself included.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> "DeviceTree":
        """A tree of the host, moved to a device."""
        depths = tree.depths()
        parents = torch.tensor([max(parent, 0) for parent in tree.parents])
        parts = torch.tensor(tree.tokens), parents, torch.tensor(depths)
        moved = [part.to(device) for part in (*parts, ancestors(parents, max(depths)))]
        return cls(*moved)


class Walk(NamedTuple):
    """The result of a walk from the root.

    Attributes:
        path: int64 [T], accepted rows, root first; entries after the first `num` are valid rows
            without meaning.
        gained: int64 [T], the token drawn after each row of the path.
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
    visible = torch.cat([visible.index_select(0, parents), itself], 1)
    tokens, states = tokens.index_select(0, places), states.index_select(0, parents)
    return Beam(places, best, tokens, states, visible)


def keep_best(
    top_k: int, tokens: Tensor, scores: Tensor, beams: Tensor, root: Tensor, rows: int
) -> DeviceTree:
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
    return DeviceTree(
        torch.cat([root.view(1), tokens[chosen]]),
        parents,
        torch.cat([zero, level + 1]),
        ancestors(parents, min(len(beams) + 1, len(chosen))),
    )


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Which rows are on the path to each, itself included: bool [R, R].

    Args:
        parents: int64 [R]; the root has 0.
        max_depth: of any row.
    """
    found = torch.eye(len(parents), dtype=torch.bool, device=parents.device)
    jumps, num_rows = parents, 1
    while num_rows <= max_depth:
        found = found | found[jumps]
        jumps, num_rows = jumps[jumps], 2 * num_rows
    return found


def walk(
    tree: DeviceTree, drawn: Tensor, limit: Tensor, stop_tokens: Tensor, max_tokens: int
) -> Walk:
    """Walk from the root by what was drawn; see `Operations.walk`."""
    rows = torch.arange(len(drawn), device=drawn.device)
    is_child = (tree.parents == rows[:, None]) & (tree.tokens == drawn[:, None])
    # 0 means none: the root is its own parent, but never a child
    child = torch.where(is_child, rows, 0).amax(1)
    is_reached = (child[tree.parents] == rows) | (rows == 0)
    is_accepted = (is_reached | ~tree.ancestors).all(1)
    steps = torch.arange(max_tokens, device=drawn.device)
    is_step = is_accepted & (tree.depths == steps[:, None])
    path = torch.where(is_step, rows, 0).amax(1)
    gained = drawn[path]
    num = torch.minimum(is_accepted.sum(), limit)
    return Walk(path, gained, num_to_stop(gained, num, stop_tokens))


def num_to_stop(tokens: Tensor, num: Tensor, stop_tokens: Tensor) -> Tensor:
    """How many of the first `num` tokens there are up to and including the first stop token.

    Args:
        tokens: int64 [T].
        num: int64 [], at most T.
        stop_tokens: int64 [S]; may be empty.

    Returns:
        int64 [].
    """
    if not len(stop_tokens):
        return num
    is_stop = (tokens[:, None] == stop_tokens).any(1)
    lengths = torch.arange(1, len(tokens) + 1, device=tokens.device)
    return torch.minimum(num, torch.where(is_stop, lengths, len(tokens)).amin())
