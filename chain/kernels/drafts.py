"""Drafts on the host: the candidates of an expansion, the tree that is made of the best, its walk.

#   K = top_k, L = levels, N = K + (L - 1) * K * K candidates
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NGRAM = "ngram"
"""Named as the proposer of copies."""
ABSENT = 1_000_000
"""Rank of a token that is not among the candidates; larger than any tree."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class DraftTree:
    """Rows of one verification pass: the root, then candidates, parents before children.

    Attributes:
        tokens: token id of each row; row 0 is the last token of the sequence.
        parents: row of each row's parent; -1 for the root.
        proposer: name of what proposes the candidates.
        num_copied: of the last rows, what n-grams proposed behind it; see `followed_by`.
    """

    tokens: list[int]
    parents: list[int]
    proposer: str = field(default="", compare=False)
    num_copied: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert self.parents[0] == -1
        assert len(self.tokens) == len(self.parents)
        assert all(map(operator.lt, self.parents, count()))

    @classmethod
    def of_root(cls, token: int) -> "DraftTree":
        """A tree without candidates."""
        return cls([token], [-1])

    @classmethod
    def of_path(cls, tokens: list[int], proposer: str) -> "DraftTree":
        """A tree without branches; the first token is the root."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), proposer)

    def where(self, is_kept: list[bool]) -> "DraftTree":
        """The rows that are kept, of which the root is one, and whose ancestors are kept."""
        row_of, tokens, parents = {-1: -1}, list[int](), list[int]()
        num_drafted = len(self) - self.num_copied
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if is_kept[row] and parent in row_of:
                row_of[row] = len(tokens)
                tokens.append(token)
                parents.append(row_of[parent])
        num_copied = sum(row >= num_drafted for row in row_of)
        return DraftTree(tokens, parents, self.proposer, num_copied)

    def after(self, tokens: list[int]) -> "DraftTree":
        """The tree behind a path of tokens, of which the last one is the root's parent."""
        num = len(tokens)
        parents = [*range(-1, num), *(parent + num for parent in self.parents[1:])]
        return DraftTree([*tokens, *self.tokens], parents, self.proposer, self.num_copied)

    def best_path(self) -> list[int]:
        """Rows from the root down, each the first child of the one before: the most probable."""
        path, children = [0], self.children()
        while children[path[-1]]:
            path.append(min(children[path[-1]].values()))
        return path

    def proposer_of(self, row: int) -> str:
        """Who proposes a candidate."""
        return NGRAM if row >= len(self) - self.num_copied else self.proposer

    def followed_by(self, row: int, tokens: list[int]) -> "DraftTree":
        """The tree with a path of copied tokens below one of its rows."""
        end = len(self) + len(tokens)
        parents = [*self.parents, row, *range(len(self), end - 1)]
        return DraftTree([*self.tokens, *tokens], parents, self.proposer, len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Distance of each row from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def children(self) -> list[dict[int, int]]:
        """For each row, its children: token id -> row."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent][self.tokens[row]] = row
        return children

    def paths(self) -> list[list[int]]:
        """For each row, the tokens from below the root down to it; empty for the root."""
        paths: list[list[int]] = [[]]
        for row in range(1, len(self)):
            paths.append([*paths[self.parents[row]], self.tokens[row]])
        return paths


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

    def first_levels(self, num_levels: int) -> "Candidates":
        """Those of the first levels, at least one."""
        if num_levels == self.num_levels:
            return self
        num = self._first(num_levels)
        return Candidates(
            self.top_k, self.tokens[:num], self.scores[:num], self.beams[: num_levels - 1]
        )

    def keep_best(
        self, root: int, rows: int, proposer: str = "", least_score: float = -math.inf
    ) -> DraftTree:
        """The tree of the best `rows - 1` candidates below the token `root`.

        Args:
            least_score: candidates that score less are left out; a parent scores no less than its
                children.
        """
        scores, all_tokens, all_beams = self._on_host()
        # The stable sort puts a parent before a child of equal score.
        best = np.sort(np.argsort(-scores, kind="stable")[: rows - 1])
        if least_score > -math.inf:
            best = best[scores[best] >= least_score]
        beams: list[int] = all_beams.ravel().tolist()
        row_of, parents = {-1: 0}, [-1]
        for row, candidate in enumerate(best.tolist(), 1):
            row_of[candidate] = row
            parents.append(row_of[self._parent(candidate, beams)])
        return DraftTree([root, *all_tokens[best].tolist()], parents, proposer)

    def best_path(self) -> list[int]:
        """Tokens from the first level down, each the most probable one after that before it."""
        _, tokens, beams = self._on_host()
        path, place = [int(tokens[0])], 0
        for level in range(1, self.num_levels):
            found = np.flatnonzero(beams[level - 1] == place)
            if not len(found):
                break
            place = int(found[0]) * self.top_k
            path.append(int(tokens[self._first(level) + place]))
        return path

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
        scores, tokens, beams = self._on_host()
        path = self._path(continuation, tokens, beams)
        numbers, own_numbers = np.arange(len(scores)), np.array(path, np.int64)[:, None]
        own_scores = scores[own_numbers]
        is_before = (scores > own_scores) | ((scores == own_scores) & (numbers < own_numbers))
        level_starts = [self._first(level) for level in range(self.num_levels)]
        num_before = np.add.reduceat(is_before, level_starts, axis=1, dtype=np.int64)
        ranks = np.full((self.num_levels, self.num_levels), ABSENT)
        ranks[:, : len(path)] = 1 + num_before.cumsum(1).T
        ranks[np.triu_indices(self.num_levels, 1)] = ABSENT
        return ranks

    def counts(self, least_scores: Sequence[float]) -> Counts:
        """How many candidates score enough: the first ones in the order of `ranks`.

        Returns:
            int64 [L, len(least_scores)]: at [d - 1, i], candidates of the first d levels that score
            at least `least_scores[i]`.
        """
        scores = self.scores.cpu()
        enough = (scores[:, None] >= scores.new_tensor(least_scores)).numpy()
        level_starts = [self._first(level) for level in range(self.num_levels)]
        by_level = np.add.reduceat(enough, level_starts, axis=0, dtype=np.int64)
        counted: Counts = by_level.cumsum(0)
        return counted

    def _on_host(self) -> tuple[NDArray[np.float32], Counts, Counts]:
        """Scores, tokens and beams."""
        parts = (self.scores, self.tokens, self.beams)
        if self.scores.is_cpu:
            scores, tokens, beams = (part.numpy() for part in parts)
            return scores, tokens, beams
        # A single transfer: float64 holds scores and token ids exactly.
        values = torch.cat([part.flatten().double() for part in parts]).cpu().numpy()
        scores, tokens, beams = np.split(values, [len(self.tokens), 2 * len(self.tokens)])
        places = beams.astype(np.int64).reshape(-1, self.top_k)
        return scores.astype(np.float32), tokens.astype(np.int64), places

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


def walk(tree: DraftTree, draw: Any) -> tuple[list[int], int]:
    """Walk from the root by sampling: every token is a draw from the verifier's distribution.

    If the drawn token is a child of the row, the walk steps there; if not, the walk ends.

    Args:
        draw: row -> token drawn from the verifier's distribution after that row.

    Returns:
        The rows of the accepted path, root first, and the token that ended the walk.
    """
    children = tree.children()
    path = [0]
    while True:
        token = draw(path[-1])
        child = children[path[-1]].get(token)
        if child is None:
            return path, token
        path.append(child)
