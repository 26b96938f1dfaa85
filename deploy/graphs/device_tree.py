"""Draft trees on the device, expanded and pruned without reading a number on the host.

The counterpart of `polybasic.deploy.drafters.expansion`. All sizes follow from a draft's shape, so
that a captured round serves every draft of that shape.

#   K = top_k, L = levels, N = K + (L - 1) * K * K candidates, H = hidden size
#   R = rows of a tree, V = tokens that can be drafted
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.torch.trees import Beam, Rows, ancestors
from polybasic.deploy.rounds.tree import DraftTree

Forward = Callable[[Tensor, Tensor, DeviceRows], Tensor]
"""Tokens [K], the states [K, H] of their parents, and how the pass attends to the cache -> the
tokens' own states [K, H]."""
_TORCH = Operations()


class DeviceTree(Rows):
    """Rows of one verification pass; see `polybasic.chain.kernels.torch.trees.Rows`."""

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> "DeviceTree":
        """A tree of the host, moved to a device."""
        depths = tree.depths()
        parents = torch.tensor([max(parent, 0) for parent in tree.parents])
        parts = torch.tensor(tree.tokens), parents, torch.tensor(depths)
        moved = [part.to(device) for part in (*parts, ancestors(parents, max(depths)))]
        return cls(*moved)


def expand(
    model_forward: Forward,
    lm_head: Callable[[Tensor], Tensor],
    operations: Operations,
    state: Tensor,
    prefix: Tensor,
    depth: int,
    top_k: int,
    token_ids: Tensor | None = None,
    window: Window | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All candidates after a state, as `polybasic.deploy.drafters.expansion.Expansion.expand`.

    Args:
        model_forward: runs the model over the beam of one level, whose rows are provisional:
            level l writes K rows after the l * K rows of the levels above it.
        lm_head: states -> logits [rows, V].
        state: [1, H], from which `lm_head` computes the distribution of the first level.
        prefix: int64 [], committed rows of the model's cache; the position of the first level.
        depth: levels, at least one.
        token_ids: int64 [V], the token of each output of `lm_head`; None if outputs are token ids.
        window: the part of a long context that rows see; None for all of it.

    Returns:
        tokens int64 [N], scores float32 [N] and beams int64 [L - 1, K], as in
        `polybasic.deploy.drafters.expansion.Candidates`.
    """
    device = state.device
    scores, tokens = operations.continuations(lm_head(state), top_k, None, token_ids)
    places = torch.arange(top_k, device=device)
    itself = torch.eye(top_k, dtype=torch.bool, device=device)
    states = state.repeat(top_k, 1)
    beam = Beam(places, scores, tokens, states, itself)
    columns = prefix + torch.arange((depth - 1) * top_k, device=device) // top_k
    all_scores, all_tokens, beams = [scores], [tokens], []
    for level in range(depth - 1):
        if level > 0:
            beam = operations.next_beam(scores, tokens, states, beam.visible)
        written = slice(level * top_k, (level + 1) * top_k)
        rows = DeviceRows(prefix, columns[written], columns[: written.stop], beam.visible, window)
        states = model_forward(beam.tokens, beam.states, rows)
        scores, tokens = operations.continuations(lm_head(states), top_k, beam.scores, token_ids)
        all_scores.append(scores)
        all_tokens.append(tokens)
        beams.append(beam.places)
    return (
        torch.cat(all_tokens),
        torch.cat(all_scores),
        torch.stack(beams) if beams else places.new_empty(0, top_k),
    )


def keep_best(
    top_k: int,
    tokens: Tensor,
    scores: Tensor,
    beams: Tensor,
    root: Tensor,
    rows: int,
    operations: Operations = _TORCH,
) -> DeviceTree:
    """The tree of the best `rows - 1` candidates, as `Candidates.keep_best`.

    Args:
        tokens, scores, beams: as `expand` returns them.
        root: int64 [], the last token of the sequence.
        rows: R, or fewer if there are not enough candidates.
    """
    return DeviceTree(*operations.keep_best(top_k, tokens, scores, beams, root, rows))
