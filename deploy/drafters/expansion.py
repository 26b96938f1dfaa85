"""EAGLE-2's dynamic tree: expand the most probable candidates, then keep the best of all.

At each depth the `top_k` candidates with the highest cumulative log-probability are expanded by
`top_k` tokens each; in the end the best `rows - 1` of all candidates are kept. A child never
scores above its parent, so they form a tree (Li et al., EAGLE-2, 2024).

#   K = top_k, L = levels, N = K + (L - 1) * K * K candidates, D = hidden size
#   V = tokens that can be drafted
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Tree, Window
from polybasic.chain.kernels.cpu.passes import NativeModel
from polybasic.chain.kernels.torch.attend import (
    Attend,
    Attending,
    View,
    attend_in_blocks,
    seen_from,
)
from polybasic.chain.model.linear import Linear
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.tree import ABSENT, Counts, DraftTree
from polybasic.deploy.rounds.verifier import PassClock

Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""Tokens [K], the states [K, D] of their parents, and how the pass attends to the cache -> the
tokens' own states [K, D]. A model that reads only tokens ignores the states."""


@dataclass(frozen=True)
class Candidates:
    """All candidates of an expansion, before the best are kept; numbered level by level.

    The first level has K candidates, the children of the root. Every other level has K * K: K for
    each member of its beam, which is the best K candidates of the level above, best first. Beams do
    not depend on the depth of the expansion: the first d levels are those of an expansion to depth
    d.

    Attributes:
        top_k: K.
        tokens: int64 [N].
        scores: float32 [N], cumulative log-probabilities.
        beams: int64 [L - 1, K], for each level but the first the members of its beam, as places
            in the level above: the candidate at place c is a child of the one at
            beams[.., c // K].
    """

    top_k: int
    tokens: Tensor
    scores: Tensor
    beams: Tensor

    @property
    def num_levels(self) -> int:
        return len(self.beams) + 1

    def keep_best(self, root: int, rows: int) -> DraftTree:
        """The tree of the best `rows - 1` candidates below the token `root`."""
        # The stable sort puts a parent before a child of equal score.
        best = self.scores.sort(descending=True, stable=True).indices
        best = best[: rows - 1].sort().values
        numbers = torch.cat([best, self.tokens[best], self.beams.flatten()]).tolist()
        chosen, tokens = numbers[: len(best)], numbers[len(best) : 2 * len(best)]
        beams = numbers[2 * len(best) :]
        row_of, parents = {-1: 0}, [-1]
        for row, candidate in enumerate(chosen, 1):
            row_of[candidate] = row
            parents.append(row_of[self._parent(candidate, beams)])
        return DraftTree([root, *tokens], parents)

    def ranks(self, continuation: list[int]) -> Counts:
        """The ranks of the tokens that actually followed among the candidates.

        The tree that `keep_best` makes of the first d levels contains the candidate of rank r if
        r <= rows - 1. Ranks increase along a path, so the tree gains as many of the tokens as
        `ranks(continuation)[d - 1]` has ranks of at most rows - 1.

        Args:
            continuation: tokens after the root, in order.

        Returns:
            int64 [L, L]: at [d - 1, l - 1], for l <= d, the rank (from 1, in the order of
            `keep_best`) of the continuation's l-th token among all candidates of the first d
            levels; `ABSENT` if it is not among them or the continuation has ended.
        """
        # A single transfer: float64 holds scores and token ids exactly.
        parts = (self.scores, self.tokens, self.beams.flatten())
        values = torch.cat([part.double() for part in parts]).cpu().numpy()
        scores, tokens, beams = np.split(values, [len(self.tokens), 2 * len(self.tokens)])
        path = self._path(continuation, tokens, beams.reshape(-1, self.top_k))
        numbers, own_numbers = np.arange(len(scores)), np.array(path, np.int64)[:, None]
        own_scores = scores[own_numbers]
        is_before = (scores > own_scores) | ((scores == own_scores) & (numbers < own_numbers))
        level_starts = [self._first(level) for level in range(self.num_levels)]
        num_before = np.add.reduceat(is_before, level_starts, axis=1, dtype=np.int64)
        ranks = np.full((self.num_levels, self.num_levels), ABSENT)
        ranks[:, : len(path)] = 1 + num_before.cumsum(1).T
        ranks[np.triu_indices(self.num_levels, 1)] = ABSENT
        return ranks

    def _path(self, continuation: list[int], tokens: Any, beams: Any) -> list[int]:
        """Numbers of the candidates along a continuation, as far as there are any."""
        path: list[int] = []
        begin = 0
        for level, token in enumerate(continuation[: self.num_levels]):
            if level > 0:
                places = np.flatnonzero(beams[level - 1] == path[-1] - self._first(level - 1))
                if not len(places):
                    break
                begin = self._first(level) + int(places[0]) * self.top_k
            found = np.flatnonzero(tokens[begin : begin + self.top_k] == token)
            if not len(found):
                break
            path.append(begin + int(found[0]))
        return path

    def _first(self, level: int) -> int:
        """Number of the first candidate of a level, counted from 0."""
        return 0 if level == 0 else self.top_k + (level - 1) * self.top_k**2

    def _parent(self, candidate: int, beams: list[int]) -> int:
        """Number of the candidate's parent; -1 is the root."""
        if candidate < self.top_k:
            return -1
        level, place = divmod(candidate - self.top_k, self.top_k**2)
        return self._first(level) + beams[level * self.top_k + place // self.top_k]


class Expandable(Attending, Protocol):
    """A model that can be expanded: a `Decoder` or an `EagleHead`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def native(self) -> NativeModel | None: ...


class Expansion:
    """Expands a model's candidates after the committed rows of its cache.

    The rows that it writes stay provisional: the next pass overwrites them.

    Args:
        model: provides shapes and positions.
        forward: runs the model over the beam of one level.
        lm_head: D -> V.
        tree: shape of the drafts.
        cache: the model's.
        token_ids: int64 [V], the token of each output of `lm_head`; None if the model drafts the
            whole vocabulary.

    Attributes:
        window: the part of a long context that the model's rows see; None for all of it.

    Raises:
        UserError: a tree wider than the vocabulary, here or when `tree` is set.
    """

    window: Window | None = None

    def __init__(
        self,
        model: Expandable,
        forward: Forward,
        lm_head: Linear,
        tree: Tree,
        cache: KeyValueCache,
        token_ids: Tensor | None = None,
    ) -> None:
        self.model, self.forward, self.lm_head = model, forward, lm_head
        self.cache, self.token_ids = cache, token_ids
        self._num_tokens = model.config.vocab_size if token_ids is None else len(token_ids)
        self._mask = _Mask(tree.top_k, model, cache.capacity)
        self.tree = tree

    @property
    def tree(self) -> Tree:
        """Shape of the next drafts."""
        return self._tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        if tree.top_k > self._num_tokens:
            raise UserError(
                "draft tree wider than the vocabulary",
                f"top_k {tree.top_k}, {self._num_tokens} tokens",
                "use a smaller top_k",
            )
        self._tree = tree
        if self._mask.top_k != tree.top_k:
            self._mask = _Mask(tree.top_k, self.model, self.cache.capacity)

    def expand(self, state: Tensor, start: int, depth: int) -> Candidates:
        """All candidates that follow a state.

        Args:
            state: [1, D], from which `lm_head` computes the distribution of the first level.
            start: committed rows of the cache; the position of the first level.
            depth: levels, at least one; independent of the tree's own depth.
        """
        top_k, mask = self._tree.top_k, self._mask
        end = start + (depth - 1) * top_k
        assert end <= self.cache.capacity, f"depth {depth} after {start} rows"
        if self.model.native is not None:
            drafted = self.model.native.draft(
                state, self.cache.layers, start, depth, top_k, self.token_ids, self.window
            )
            return Candidates(top_k, *drafted)
        scores, tokens = self._best(state)
        scores, tokens = scores[0], tokens[0]
        all_scores, all_tokens, beams = [scores], [tokens], []
        beam_scores, beam_tokens = scores, tokens
        beam = torch.arange(top_k, device=self.model.device)
        states = state.expand(top_k, -1)
        mask.begin(start, depth * top_k)
        for level in range(depth - 1):
            if level > 0:
                beam_scores, beam = scores.topk(top_k)
                parents = beam // top_k
                beam_tokens, states = tokens[beam], states[parents]
                mask.select(parents)
            states = self.forward(beam_tokens, states, self._attend(start, level))
            log_probabilities, tokens = self._best(states)
            scores = (beam_scores[:, None] + log_probabilities).flatten()
            tokens = tokens.flatten()
            all_scores.append(scores)
            all_tokens.append(tokens)
            beams.append(beam)
        return Candidates(
            top_k,
            torch.cat(all_tokens),
            torch.cat(all_scores),
            torch.stack(beams) if beams else beam.new_empty(0, top_k),
        )

    def _attend(self, start: int, level: int) -> Attend:
        """How the beam of a level attends to the cache: all its rows have one position."""
        position, mask = start + level, self._mask.of_level(level)
        rotations = self.model.rotary.between(position, position + 1)
        views = []
        for kind, rotation in zip(self.model.config.kinds, rotations, strict=True):
            leading, first = seen_from(position, kind, self.window)
            sinks = range(self._row_of(leading.start, start), self._row_of(leading.stop, start))
            view = View(rotation, first=self._row_of(first, start), sinks=sinks)
            view.mask = view.of(mask, mask.shape[1], 1)
            views.append(view)
        top_k = self._tree.top_k
        return Attend(start + level * top_k, top_k, start, prepared=views, window=self.window)

    def _row_of(self, position: int, start: int) -> int:
        """The first row of the cache for a position; from `start` on, each has top_k rows."""
        return min(position, start) + max(position - start, 0) * self._tree.top_k

    def _best(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens, each [R, K], of the best outputs after each state.

        Minus infinity where logits overflow: NaN would sort a child before its parent.
        """
        log_probabilities = self.lm_head(states).log_softmax(-1, dtype=torch.float32)
        best, outputs = log_probabilities.topk(self._tree.top_k)
        best = best.masked_fill(best.isnan(), float("-inf"))
        return best, outputs if self.token_ids is None else self.token_ids[outputs]


class ExpandingDrafter(ABC):
    """Base of drafters that expand a model into a tree.

    Args:
        expansion: of the model.
        lag: tokens of the sequence before the first one that the model reads: 1 for a head, whose
            row t holds token t + 1.
    """

    def __init__(self, expansion: Expansion, lag: int) -> None:
        self.expansion, self.lag = expansion, lag
        self.clock = PassClock(expansion.model.device)

    @property
    def min_tokens(self) -> int:
        """Tokens that a sequence needs before a draft."""
        return self.lag + 1

    @property
    def cache(self) -> KeyValueCache:
        """The cache of the model."""
        return self.expansion.cache

    @property
    def tree(self) -> Tree:
        """Shape of the next drafts."""
        return self.expansion.tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self.expansion.tree = tree

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """See `polybasic.deploy.drafters.interface.Drafter`."""
        depth = min(max_depth, self.tree.depth)
        if depth == 0 or len(tokens) < self.min_tokens:
            return DraftTree.of_root(tokens[-1])
        with self.clock.running(num_passes=depth):
            return self.candidates(tokens, depth).keep_best(tokens[-1], self.tree.rows)

    @property
    def window(self) -> Window | None:
        """The part of a long context that the model sees; None for all. Set between sequences."""
        return self.expansion.window

    @window.setter
    def window(self, window: Window | None) -> None:
        self.expansion.window = window

    def candidates(self, tokens: list[int], depth: int) -> Candidates:
        """All candidates after the sequence `tokens`, which has at least `min_tokens`.

        Args:
            depth: levels; may exceed those of the tree.
        """
        self.begin(tokens)
        state = self.read(tokens, len(tokens) - self.lag)
        return self.expansion.expand(state, self.cache.length, depth)

    def begin(self, tokens: list[int]) -> int:
        """Prepare for a draft after `tokens`; the number of rows of the cache that stay.

        The last row is always read again: the draft starts from its state.
        """
        self.cache.truncate(min(self.cache.length, len(tokens) - self.lag - 1))
        return self.cache.length

    def read(self, tokens: list[int], end: int) -> Tensor:
        """Read the rows from the cache's length up to `end`; the state [1, D] of the last one."""
        start, model = self.cache.length, self.expansion.model
        for block in attend_in_blocks(model, start, end - start, self.window):
            first = block.start + self.lag
            ids = torch.tensor(tokens[first : first + block.num_rows], device=model.device)
            states = self._read(ids, block)
        self.cache.keep(range(end - start))
        return states[-1:]

    @abstractmethod
    def _read(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """States [R, D] of consecutive tokens that the cache does not hold yet."""


class _Mask:
    """Which rows each candidate of a draft sees: all earlier rows, its ancestors and itself.

    One row for each beam member and query head, one column for each row of the model's cache.
    """

    def __init__(self, top_k: int, model: Expandable, capacity: int) -> None:
        self.top_k = top_k
        groups, dtype, device = model.config.query_groups, model.dtype, model.device
        self._buffer = torch.zeros((top_k, groups, capacity), dtype=dtype, device=device)
        itself = torch.full((top_k, top_k), float("-inf")).fill_diagonal_(0)
        self._itself = itself[:, None].expand(-1, groups, -1).to(device, dtype)
        self._start = 0
        self._columns = slice(0, 0)

    def begin(self, start: int, num_columns: int) -> None:
        """Start a draft of `num_columns` rows after `start` rows, all of which are seen."""
        self._buffer[..., self._columns] = 0
        self._start, self._columns = start, slice(start, start + num_columns)

    def of_level(self, level: int) -> Tensor:
        """Mask [top_k * query groups, start + (level + 1) * top_k] of a level's beam."""
        first = self._start + level * self.top_k
        self._buffer[..., first : first + self.top_k] = self._itself
        return self._buffer[..., : first + self.top_k].flatten(0, 1)

    def select(self, parents: Tensor) -> None:
        """The next beam: each member sees what its parent saw."""
        self._buffer[..., self._columns] = self._buffer[parents, :, self._columns]
