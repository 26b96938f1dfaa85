"""Passes that a sequence waits for: stages yield them, and a driver runs them.

`alone` runs the passes of one sequence as they come. `polybasic.deploy.runtime.batching` collects
those of many sequences and runs those of one model together.

#   R = rows (tokens of one pass), W = width of the verifier's states, V = vocabulary
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter, draft_together
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.rounds.constraint import GRAMMAR, Constraint
from polybasic.deploy.runtime.rounds.draws import Draws, distributions_together
from polybasic.deploy.runtime.rounds.verifier import Verifier, logits_together, read_together

T = TypeVar("T")


class Pass(Protocol):
    """A pass that a sequence waits for."""

    @property
    def kind(self) -> Hashable:
        """Passes of one kind can be run together."""

    def run(self) -> Any:
        """The result, of this pass alone."""


Passes = Generator[Pass, Any, T]
"""Work that yields the passes it needs, is sent their results, and returns a T."""


def alone(work: Passes[T]) -> T:
    """What work returns whose passes are run as they come."""
    result: Any = None
    while True:
        try:
            waiting = work.send(result)
        except StopIteration as end:
            returned: T = end.value
            return returned
        result = waiting.run()


class Read(NamedTuple):
    """What a verifier's pass gives.

    Attributes:
        states: [R, W].
        logits: [R - logits_from, V]; None if none were asked for.
        distributions: gives those that are drawn from, where the pass says who draws.
    """

    states: Tensor
    logits: Any
    distributions: Callable[[], Any] | None = None


@dataclass(frozen=True)
class VerifierPass:
    """A pass of a verifier over consecutive tokens or a tree; its result is a `Read`.

    Attributes:
        rows: tokens after the committed ones, or a tree.
        logits_from: the first row whose logits are asked for; None asks for none.
        is_prompt: whether a prompt is read, which others' rounds need not wait for.
        draws: who draws from the logits; None if nobody does.
    """

    verifier: Verifier
    rows: list[int] | DraftTree
    logits_from: int | None = 0
    is_prompt: bool = False
    draws: Draws | None = None

    @property
    def kind(self) -> Hashable:
        return self.verifier.kind

    def run(self) -> Read:
        verifier, rows = self.verifier, self.rows
        states = verifier.read_tree(rows) if isinstance(rows, DraftTree) else verifier.read(rows)
        first = self.logits_from
        if first is None:
            return Read(states, None)
        logits = verifier.logits(states[first:] if first else states)
        return Read(states, logits, self.draws and self.draws.distributions(logits))

    @staticmethod
    def run_together(passes: "Sequence[VerifierPass]") -> list[Read]:
        """The results of passes of one kind."""
        verifiers = [reading.verifier for reading in passes]
        states = read_together(verifiers, [reading.rows for reading in passes])
        firsts = [reading.logits_from for reading in passes]
        logits = logits_together(verifiers, states, firsts)
        found = distributions_together([reading.draws for reading in passes], logits)
        return [Read(*read) for read in zip(states, logits, found, strict=True)]


@dataclass(frozen=True)
class DraftPass:
    """A draft by a model; its result is a `DraftTree`. See `Drafter.draft` for the attributes."""

    drafter: ExpandingDrafter
    tokens: list[int]
    max_depth: int

    @property
    def kind(self) -> Hashable:
        return self.drafter.kind

    def run(self) -> DraftTree:
        return self.drafter.draft(self.tokens, self.max_depth)

    @staticmethod
    def run_together(passes: "Sequence[DraftPass]") -> list[DraftTree]:
        """The results of passes of one kind."""
        return draft_together(
            [drafting.drafter for drafting in passes],
            [drafting.tokens for drafting in passes],
            [drafting.max_depth for drafting in passes],
        )


@dataclass(frozen=True)
class OwnPass:
    """A pass that is never run together with others, as of a round that stays on a device.

    Attributes:
        launch: begins it; the work that waits for it reads what it leaves.
    """

    launch: Callable[[], None]

    @property
    def kind(self) -> Hashable:
        return id(self)

    def run(self) -> None:
        self.launch()


def draft(
    drafter: Drafter, tokens: list[int], max_depth: int, constraint: Constraint | None = None
) -> Passes[DraftTree]:
    """What a drafter drafts; only where a model drafts, a pass is waited for.

    Args:
        constraint: nothing is drafted that it refuses. What it foretells is drafted instead of what
            a model would draft, or of a copy that does not begin so.
    """
    foretold = constraint.foretold(tokens, max_depth) if constraint is not None else []
    ngrams = drafter if isinstance(drafter, NgramDrafter) else None
    if ngrams is not None:
        copied = ngrams.copied(tokens, max_depth)
        if copied is not None and constraint is not None:
            copied = constraint.pruned(copied, tokens)
            if len(copied) == 1 or foretold not in copied.paths():
                copied = None
        if copied is not None:
            return copied
        drafter = ngrams.fallback
    if foretold:
        return DraftTree.of_path([tokens[-1], *foretold], GRAMMAR)
    if isinstance(drafter, ExpandingDrafter):
        tree = yield DraftPass(drafter, tokens, max_depth)
    else:
        tree = drafter.draft(tokens, max_depth)
    if ngrams is not None:
        tree = ngrams.extended(tree, max_depth)
    return tree if constraint is None else constraint.pruned(tree, tokens)


def run_together(passes: Sequence[Any]) -> list[Any]:
    """The results of passes of one kind, each charged with the seconds of all."""
    if len(passes) == 1:
        return [passes[0].run()]
    found: list[Any] = type(passes[0]).run_together(passes)
    return found
