"""A drafter's candidates for one verification pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABSENT = 1_000_000
"""Rank of a token that is not among the candidates; larger than any tree."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class DraftTree:
    """Rows of one verification pass: the root, then candidates, parents before children.

    Attributes:
        tokens: token id of each row; row 0 is the last token of the sequence.
        parents: row of each row's parent; -1 for the root.
    """

    tokens: list[int]
    parents: list[int]

    def __post_init__(self) -> None:
        assert self.parents[0] == -1
        assert len(self.tokens) == len(self.parents)
        assert all(parent < row for row, parent in enumerate(self.parents))

    @classmethod
    def of_root(cls, token: int) -> "DraftTree":
        """A tree without candidates."""
        return cls([token], [-1])

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
