"""Draft trees of heads that give the logits of several positions at once.

Such a head knows no drafted token when it computes the logits of a position. A correction may add
to them what follows from the tokens that a candidate descends from.

#   L = levels, K = top_k, S = width of a correction's states, V = tokens that can be drafted
"""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.torch.expansion import Level, expand, expansion
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.weights import PositionWeights

NUM_CORRECTED = 32
"""Most probable tokens of a position whose logits bigrams correct; the others stay."""


class Correction(Protocol):
    """What the logits of a position gain from the drafted tokens before it."""

    def begin(self) -> Tensor:
        """The state [1, S] before any drafted token."""

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Tokens [K] and the states [K, S] before them -> the states [K, S] after them."""

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        """The logits [K, V] of a position, given its own [V] and states [K, S]."""


class NoCorrection:
    """Positions are taken to be independent of each other."""

    def __init__(self, state: Tensor) -> None:
        self._state = state[:1, :1]

    def begin(self) -> Tensor:
        return self._state

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        return states

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        return position.expand(len(states), -1)


class Bigrams:
    """Adds a low-rank table of bigrams to the logits of each position's most probable tokens.

    Args:
        weights: with a table.
        scale: of the logits, hence of what is added.
        num_best: tokens of a position that are corrected.
    """

    def __init__(self, weights: PositionWeights, scale: float | Tensor, num_best: int) -> None:
        assert weights.markov_in is not None
        assert weights.markov_out is not None
        self._into, self._out = weights.markov_in, weights.markov_out
        self._scale, self._num_best = scale, num_best

    def begin(self) -> Tensor:
        return self._into.new_zeros(1, self._into.shape[1])

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        return self._into[token_ids]

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        best = position.topk(self._num_best).indices
        added = states.float() @ self._out[best].float().T
        logits = position.float().repeat(len(states), 1)
        return logits.index_add(1, best, added * self._scale)


def position_drafts(
    weights: PositionWeights,
    positions: Tensor,
    operations: Operations,
    prefix: Tensor,
    top_k: int,
    token_ids: Tensor | None = None,
    perturbation: Perturbation | None = None,
    least_score: float = -math.inf,
) -> Candidates:
    """The draft of a block-parallel head, given its logits [L, V]; see `expand_positions`.

    Where there is noise, the tokens that are corrected are those that it makes the largest.
    """
    scale: float | Tensor = 1.0
    if perturbation is not None:
        added, scale = perturbation.added[: len(positions)], perturbation.scale
        added = added if token_ids is None else added[:, token_ids]
        positions = positions.float() * scale + added
    correction = None
    if weights.markov_in is not None:
        num_best = min(max(NUM_CORRECTED, top_k), positions.shape[1])
        correction = Bigrams(weights, scale, num_best)
    return expand_positions(
        positions, operations, prefix, top_k, correction, token_ids, least_score=least_score
    )


def expand_positions(
    positions: Tensor,
    operations: Operations,
    prefix: Tensor,
    top_k: int,
    correction: Correction | None = None,
    token_ids: Tensor | None = None,
    perturbation: Perturbation | None = None,
    least_score: float = -math.inf,
) -> Candidates:
    """All candidates below a root, level by level as `Executor.drafts` has them.

    Args:
        positions: logits [L, V] of the tokens after the root.
        prefix: int64 [], any number: no cache is read.
        top_k: at most V.
        correction: of the logits; None takes them as they are.
        token_ids: int64 [V], the token of each output; None if outputs are token ids.
        perturbation: of the corrected logits.
        least_score: no level follows one whose candidates all score less.
    """
    correcting = correction or NoCorrection(positions)
    state = correcting.begin()

    def run(levels: Sequence[Level]) -> list[tuple[Tensor, Tensor]]:
        [level] = levels
        states = correcting.step(level.tokens, level.states)
        return [(states, correcting.logits(positions[level.number + 1], states))]

    work = expansion(
        correcting.logits(positions[0], state),
        operations,
        state,
        prefix,
        len(positions),
        top_k,
        token_ids,
        perturbation=perturbation,
        least_score=least_score,
    )
    return expand([work], run)[0]
