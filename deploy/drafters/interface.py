"""The interface of drafters, which propose a tree of candidates for the innermost verifier.

#   R = rows (tokens), W = width of the verifier's states
"""

from typing import Protocol

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.rounds.verifier import PassClock


class Drafter(Protocol):
    """Proposes candidates for one sequence at a time.

    Drafts depend only on the calls since the last `rewind(0)` and on the noise that the verifier
    draws with, if it has any: there is no other randomness and no memory of other sequences. Hence
    a walk over them needs no rejection, and a seed gives the same answer whatever was answered
    before.

    Attributes:
        tree: shape of the drafts.
    """

    tree: Tree

    @property
    def clock(self) -> PassClock | None:
        """Counts the passes of the drafter's model; None if it has none."""

    def observe(self, states: Tensor) -> None:
        """Append the verifier's states [R, W] of the next R tokens of the sequence."""

    def rewind(self, num_observed: int) -> None:
        """Forget all but the first `num_observed` states; the tokens after them may change.

        0 begins a new sequence.
        """

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """Candidates after the sequence `tokens`, at most `max_depth` deep.

        All tokens have been observed except the last, which becomes the root.
        """


class NoDrafter:
    """Proposes nothing: the verifier runs alone, one token a pass."""

    clock: PassClock | None = None

    def __init__(self) -> None:
        self.tree = Tree(depth=1, top_k=1, rows=2)

    def observe(self, states: Tensor) -> None:
        """Nothing to learn from."""

    def rewind(self, num_observed: int) -> None:
        """Nothing to forget."""

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree.of_root(tokens[-1])
