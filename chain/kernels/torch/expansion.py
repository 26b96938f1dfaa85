"""EAGLE-2's expansion of a draft, level by level, in PyTorch's operations.

All sizes follow from a draft's shape and the host reads no number, so that a captured draft serves
every draft of that shape; only a draft that may end early reads each level's best score.

#   K = top_k, L = levels, N = K + (L - 1) * K * K candidates, D = hidden size
#   V = tokens that can be drafted
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.torch.trees import Beam

Forward = Callable[[Tensor, Tensor, DeviceRows], Tensor]
"""Tokens [K], the states [K, D] of their parents, and how the pass attends to the cache -> the
tokens' own states [K, D]."""


@dataclass(frozen=True)
class Level:
    """A level of a draft, which waits for its pass; its rows are provisional.

    Attributes:
        tokens: int64 [K].
        states: [K, D] of their parents.
        rows: level l writes K rows after the l * K rows of the levels above it.
    """

    tokens: Tensor
    states: Tensor
    rows: DeviceRows


Expansion = Generator[Level, tuple[Tensor, Tensor], Candidates]
"""Is sent the states [K, D] of each level that it yields, and their logits [K, V]."""


def expand(
    forward: Forward,
    logits: Callable[[Tensor, int], Tensor],
    operations: Operations,
    state: Tensor,
    prefix: Tensor,
    depth: int,
    top_k: int,
    token_ids: Tensor | None = None,
    window: Window | None = None,
    perturbation: Perturbation | None = None,
    known_prefix: int | None = None,
    least_score: float = -math.inf,
) -> Candidates:
    """All candidates after a state; see `polybasic.chain.kernels.executor.Executor.drafts`.

    Args:
        forward: runs the model over the beam of one level, see `Level`.
        logits: states and their level, from 0 -> logits [rows, V].
        state: [1, D], which the first level follows.
        prefix: int64 [], committed rows of the model's cache; the position of the first level.
        depth: levels, at least one.
        token_ids: int64 [V], the token of each output; None if outputs are token ids.
        window: the part of a long context that rows see; None for all of it.
        perturbation: of the logits.
        known_prefix: the number in `prefix`, if the host knows it.
        least_score: no level follows one whose candidates all score less.
    """
    work = expansion(
        logits(state, 0), operations, state, prefix, depth, top_k, token_ids, window, perturbation,
        known_prefix, least_score,
    )  # fmt: skip
    try:
        level, number = next(work), 1
        while True:
            states = forward(level.tokens, level.states, level.rows)
            level, number = work.send((states, logits(states, number))), number + 1
    except StopIteration as end:
        found: Candidates = end.value
        return found


def expansion(
    first: Tensor,
    operations: Operations,
    state: Tensor,
    prefix: Tensor,
    depth: int,
    top_k: int,
    token_ids: Tensor | None = None,
    window: Window | None = None,
    perturbation: Perturbation | None = None,
    known_prefix: int | None = None,
    least_score: float = -math.inf,
) -> Expansion:
    """The work of `expand` between its passes, which whoever drives it runs.

    Args:
        first: logits [1, V] of the state.
    """
    device = state.device

    def perturbed(given: Tensor, level: int) -> Tensor:
        if perturbation is None:
            return given
        added = perturbation.added[level]
        return given.float() * perturbation.scale + (
            added if token_ids is None else added[token_ids]
        )

    scores, tokens = operations.continuations(perturbed(first, 0), top_k, None, token_ids)
    places = torch.arange(top_k, device=device)
    itself = torch.eye(top_k, dtype=torch.bool, device=device)
    states = state.repeat(top_k, 1)
    beam = Beam(places, scores, tokens, states, itself)
    columns = prefix + torch.arange((depth - 1) * top_k, device=device) // top_k
    all_scores, all_tokens, beams = [scores], [tokens], []
    for level in range(depth - 1):
        if least_score > -math.inf and not bool((scores >= least_score).any()):
            break
        if level > 0:
            beam = operations.next_beam(scores, tokens, states, beam.visible)
        written = slice(level * top_k, (level + 1) * top_k)
        seen = columns[: written.stop]
        rows = DeviceRows(prefix, columns[written], seen, beam.visible, window, known_prefix)
        states, logits = yield Level(beam.tokens, beam.states, rows)
        scores, tokens = operations.continuations(
            perturbed(logits, level + 1), top_k, beam.scores, token_ids
        )
        all_scores.append(scores)
        all_tokens.append(tokens)
        beams.append(beam.places)
    return Candidates(
        top_k,
        torch.cat(all_tokens),
        torch.cat(all_scores),
        torch.stack(beams) if beams else places.new_empty(0, top_k),
    )
