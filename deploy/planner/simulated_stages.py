"""Rounds of the stages of a plan, played along measured answers without any model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polybasic.chain.formats.plan import Flush
from polybasic.chain.kernels.drafts import Counts
from polybasic.deploy.planner.prediction import PlayedBlock
from polybasic.deploy.runtime.rounds.flushing import AdaptiveFlushing
from polybasic.deploy.runtime.rounds.stages import FEW_UNREAD


@dataclass(frozen=True)
class TreeRounds:
    """Rounds of the innermost stage, by the position where they begin.

    Attributes:
        gains: tokens gained where the walk stays on y.
        own_gains: tokens gained where it leaves y.
        rows: of the verification pass.
        depths: passes of the drafter.
    """

    gains: list[int]
    own_gains: list[int]
    rows: Counts
    depths: Counts


_WantsMore = Callable[[int, int], bool]
"""Positions where a round began and ended -> whether another one is to follow."""


class SimulatedTreeStage:
    """Simulates `polybasic.deploy.runtime.rounds.stages.TreeStage`.

    Args:
        reads_with_tree: whether the first pass of a block reads the few tokens before it, too.
    """

    def __init__(self, rounds: TreeRounds, reads_with_tree: bool) -> None:
        self.rounds, self.reads_with_tree = rounds, reads_with_tree
        self.rows_before: list[int] = []  # that the pass of each of these rounds reads, too
        self.visited: list[int] = []  # where rounds began
        self._num_gained = 0
        self.catch_up_rows: list[int] = []
        self._read = 0  # position up to which the cache holds the sequence
        self._end = 0

    def begin(self, start: int, end: int, limit: int) -> None:
        # The last token of the prompt has not been read yet.
        self._read, self._end = start - 1, end

    def propose(
        self, position: int, goal: int, wants_more: _WantsMore | None, divergence: int
    ) -> int:
        num_before = max(position - 1 - self._read, 0)
        if num_before and not (self.reads_with_tree and num_before <= FEW_UNREAD):
            self.catch_up_rows.append(num_before)
            num_before = 0
        self._read = position - 1 - num_before
        gains, own_gains, visited = self.rounds.gains, self.rounds.own_gains, self.visited
        goal = min(goal, self._end)
        while position < goal:
            visited.append(position)
            self.rows_before.append(num_before)
            num_before = 0
            begun, gain = position, gains[position]
            if position + gain > divergence:
                # The walk leaves y there and goes on along the model's own tokens.
                gain = max(divergence + 1 - position, own_gains[position])
            position += gain
            self._num_gained += gain
            if wants_more is not None and not wants_more(begun, position):
                break
        self._read = position - 1 - num_before
        return position

    def resolve(self, length: int, was_read: bool) -> None:
        self._read = length if was_read else min(self._read, length)

    def rows_read(self) -> tuple[Counts, Counts]:
        """Rows of passes, and how many passes had so many."""
        of_rounds = self.rounds.rows[self.visited] + np.array(self.rows_before, dtype=np.int64)
        rows = [of_rounds, np.array(self.catch_up_rows, dtype=np.int64)]
        return np.unique(np.concatenate(rows), return_counts=True)

    def num_gained(self) -> int:
        return self._num_gained


class SimulatedBlockStage:
    """Simulates `polybasic.deploy.runtime.rounds.stages.BlockStage`."""

    extents: list[int]
    confidence: list[float]
    own_confidence: list[float]

    def __init__(
        self, below: "SimulatedTreeStage | SimulatedBlockStage", flush: Flush, shares_cache: bool
    ) -> None:
        self.below, self.flush, self.shares_cache = below, flush, shares_cache
        self.num_proposed = 0
        self.blocks: list[PlayedBlock] = []
        self._is_first = True
        self._flush_length = flush.length
        self._flushing: AdaptiveFlushing | None = None
        self._rows: list[int] = []
        self._num_gained = 0
        self._read = self._end = self._limit = self._divergence = 0

    def begin(self, start: int, end: int, limit: int) -> None:
        self._is_first = True
        # The stage adds one token to the gain of the stage below.
        self._read, self._end, self._limit = start - 1, end, limit - 1
        if self.flush.adaptive is not None:
            self._flushing = AdaptiveFlushing(self.flush.adaptive)
        self.below.begin(start, end, limit - 1)

    def propose(
        self, position: int, goal: int, wants_more: _WantsMore | None, divergence: int
    ) -> int:
        goal = min(goal, self._end)
        while position < goal:
            begun, position = position, self._round(position, divergence)
            if wants_more is not None and not wants_more(begun, position):
                break
        return position

    def resolve(self, length: int, was_read: bool) -> None:
        self._read = length if was_read else min(self._read, length)
        self.below.resolve(length, was_read and self.shares_cache)

    def _round(self, position: int, divergence_above: int) -> int:
        goal = min(position + self._flush_length, self._limit)
        self._divergence = position + self.extents[position]
        divergence = min(self._divergence, divergence_above)
        if self._flushing is None:
            reached = self.below.propose(position, goal, None, divergence)
        else:
            self._flushing.begin_block()
            reached = self.below.propose(position, goal, self._wants_more, divergence)
        kept = min(self._divergence, reached)
        if self._flushing is not None:
            self._flushing.learn(kept - position)
        self.num_proposed += reached - position
        self._rows.append(reached - self._read)
        is_foreseen = self._divergence > reached
        self.blocks.append(PlayedBlock(self._rows[-1], is_foreseen, self._is_first))
        self._is_first = False
        # Nothing follows a stop token that is kept.
        stands = min(kept + 1, self._end)
        self._num_gained += stands - position
        self._read = stands - 1
        self.below.resolve(stands - 1, self.shares_cache)
        return stands

    def _wants_more(self, begun: int, reached: int) -> bool:
        assert self._flushing is not None
        divergence = min(max(self._divergence, begun), reached)
        return self._flushing.wants_more(
            self.confidence[begun:divergence] + self.own_confidence[divergence:reached]
        )

    def rows_read(self) -> tuple[Counts, Counts]:
        """Rows of passes, and how many passes had so many."""
        return np.unique(np.array(self._rows, dtype=np.int64), return_counts=True)

    def num_gained(self) -> int:
        return self._num_gained
