"""What proposes a tree of candidates for the innermost verifier.

#   R = rows (tokens), W = width of the verifier's states
"""

from typing import Protocol

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.deploy.rounds.tree import DraftTree
from polybasic.deploy.rounds.verifier import PassClock


class Drafter(Protocol):
    """Proposes candidates for one sequence at a time.

    Drafts are decided by the calls since the last `rewind(0)` and by nothing else: no randomness,
    no memory of other sequences. A walk over them then needs no rejection, and a seed gives one
    answer whatever was answered before.

    Attributes:
        tree: shape of the drafts; may be set between sequences.
    """

    tree: Tree

    @property
    def clock(self) -> PassClock | None:
        """Counts the passes of the drafter's model; None where there is none."""

    def observe(self, states: Tensor) -> None:
        """Append the verifier's states [R, W] of the next R tokens of the sequence."""

    def rewind(self, num_observed: int) -> None:
        """Forget all but the first `num_observed` states; the tokens behind them may change.

        With 0 a sequence begins.
        """

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """Candidates behind the sequence `tokens`, at most `max_depth` deep.

        All tokens but the last, which becomes the root, were observed.
        """


class NoDrafter:
    """Proposes nothing: the verifier runs alone, a token a pass."""

    clock: PassClock | None = None

    def __init__(self) -> None:
        self.tree = Tree(depth=1, top_k=1, rows=2)

    def observe(self, states: Tensor) -> None:
        """Nothing to learn from."""

    def rewind(self, num_observed: int) -> None:
        """Nothing to forget."""

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree.of_root(tokens[-1])
