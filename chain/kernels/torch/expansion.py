"""EAGLE-2's expansion of a draft, level by level, in PyTorch's operations.

All sizes follow from a draft's shape and the host reads no number, so that a captured draft serves
every draft of that shape; only a draft that may end early reads each level's best score.

#   K = top_k, L = levels, N = K + (L - 1) * K * K candidates, D = hidden size
#   V = tokens that can be drafted
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.torch.trees import Beam


@dataclass(frozen=True)
class Level:
    """A level of a draft, which waits for its pass; its rows are provisional.

    Attributes:
        number: from 0; its logits are those of the next level's tokens.
        tokens: int64 [K].
        states: [K, D] of their parents.
        rows: of the cache, K after the `number` * K of the levels above it.
    """

    number: int
    tokens: Tensor
    states: Tensor
    rows: DeviceRows


Expansion = Generator[Level, tuple[Tensor, Tensor], Candidates]
"""Is sent the states [K, D] of each level that it yields, and their logits [K, V]."""
Run = Callable[[Sequence[Level]], Sequence[tuple[Tensor, Tensor]]]
"""Levels of different drafts -> for each, the states [K, D] of its tokens and their logits [K, V],
by a pass over all of them or by one for each."""


def expand(works: Sequence[Expansion], run: Run) -> list[Candidates]:
    """The candidates of several drafts, level by level together."""
    found: dict[int, Candidates] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(works)))
    while answers:
        levels: dict[int, Level] = {}
        for place, answer in answers.items():
            try:
                levels[place] = works[place].send(answer)
            except StopIteration as end:
                found[place] = end.value
        answers = dict(zip(levels, run(list(levels.values())), strict=True)) if levels else {}
    return [found[place] for place in range(len(works))]


def expansion(
    logits: Tensor,
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
    """All candidates after a state; see `polybasic.chain.kernels.executor.Executor.drafts`.

    Args:
        logits: [1, V] of the state.
        state: [1, D], which the first level follows.
        prefix: int64 [], committed rows of the model's cache; the position of the first level.
        depth: levels, at least one.
        token_ids: int64 [V], the token of each output; None if outputs are token ids.
        window: the part of a long context that rows see; None for all of it.
        perturbation: of the logits.
        known_prefix: the number in `prefix`, if the host knows it.
        least_score: no level follows one whose candidates all score less.
    """
    device = state.device

    def perturbed(given: Tensor, level: int) -> Tensor:
        if perturbation is None:
            return given
        added = perturbation.added[level]
        return given.float() * perturbation.scale + (
            added if token_ids is None else added[token_ids]
        )

    scores, tokens = operations.continuations(perturbed(logits, 0), top_k, None, token_ids)
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
        states, logits = yield Level(level, beam.tokens, beam.states, rows)
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
