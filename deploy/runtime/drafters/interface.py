"""The interface of drafters, which propose a tree of candidates for the innermost verifier.

#   R = rows (tokens), W = width of the verifier's states
"""

from typing import Protocol

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.rounds.verifier import PassClock


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
    def num_observed(self) -> int | None:
        """Leading states that it holds, those of the sequence before included; None if it needs
        none."""

    @property
    def clock(self) -> PassClock | None:
        """Counts the passes of the drafter's model; None if it has none."""

    def observe(self, states: Tensor) -> None:
        """Append the verifier's states [R, W] of the next R tokens of the sequence."""

    def rewind(self, num_observed: int) -> None:
        """Forget all but the first `num_observed` states; the tokens after them may change.

        0 begins a new sequence, more another one with the same leading tokens.
        """

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """Candidates after the sequence `tokens`, at most `max_depth` deep.

        All tokens have been observed except the last, which becomes the root.
        """


class NoDrafter:
    """Proposes nothing: the verifier runs alone, one token a pass."""

    clock: PassClock | None = None
    num_observed = None

    def __init__(self) -> None:
        self.tree = Tree(depth=1, top_k=1, rows=2)

    def observe(self, states: Tensor) -> None:
        """Nothing to learn from."""

    def rewind(self, num_observed: int) -> None:
        """Nothing to forget."""

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree.of_root(tokens[-1])


class IdleDrafter:
    """Proposes nothing, and observes for a drafter that may draft later.

    Args:
        drafter: observes.
    """

    clock: PassClock | None = None

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.tree = drafter, Tree(depth=1, top_k=1, rows=2)

    @property
    def num_observed(self) -> int | None:
        return self._drafter.num_observed

    def observe(self, states: Tensor) -> None:
        self._drafter.observe(states)

    def rewind(self, num_observed: int) -> None:
        self._drafter.rewind(num_observed)

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree.of_root(tokens[-1])
