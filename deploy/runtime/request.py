"""What is asked of an engine, and the answer as it comes."""

from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.runtime.rounds.proposals import Proposals
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stopping import AnswerText, StoppedBy

Part = TypeVar("Part")


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
        token_ids: the prompt, at least one token.
        plan: which members run and how; they can run it.
        constraint: that the answer has to hold to.
        text: of the answer, where it is asked for or stop strings may end it; used up by one run.
        logprobs: most probable tokens that are named beside each token, with log-probabilities;
            None gives none.
        prompt_logprobs: the same of the prompt's tokens.
        reuses: whether what was read for earlier requests need not be read again.
        follows_plans: whether the engine's plan of load and context replaces `plan` between rounds.
        kept_drafter: a drafter that observes while the plan has none.
        history: that is copied from, and learns the sequence at its end.
    """

    token_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: Collection[int]
    plan: Plan
    text: AnswerText | None = None
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    reuses: bool = False
    follows_plans: bool = False
    kept_drafter: str | None = None
    history: History | None = None


@dataclass(frozen=True)
class Statistics:
    """What a generation cost.

    Attributes:
        num_prompt_tokens: of the prompt.
        num_tokens: new tokens, a stop token included.
        seconds: prefill included, and the waits for other sequences.
        prefill_seconds: of these, until all that runs had read the prompt.
        forward_passes: of each member, by name, without the prefill.
        seconds_by_member: of their passes, without the prefill; a pass that several sequences share
            counts for each of them.
        accepted_lengths: of each verifying member, tokens gained by each of its passes.
        stopped_by: "stop" (a stop token was drawn), "stop_string" or "length"; None where it was
            given up or failed.
        seed: of the draws, given or drawn; None if they were greedy.
        num_cached_tokens: of the prompt, which an earlier request had read.
        proposals: by member, what it proposed to the verifier above it.
        num_first: new tokens that came with the prompt's last pass, 1 at most.
        num_pauses: times that the caches were given up to others, and filled again.
        num_tolerated: new tokens that are not the target's own, which a lossy plan has kept; None
            where the plan is lossless.
    """

    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    prefill_seconds: float
    forward_passes: dict[str, int]
    seconds_by_member: dict[str, float]
    accepted_lengths: dict[str, list[int]]
    stopped_by: StoppedBy | None
    seed: int | None = None
    num_cached_tokens: int = 0
    proposals: dict[str, Proposals] = field(default_factory=dict)
    num_first: int = 0
    num_pauses: int = 0
    num_tolerated: int | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether the answer follows the target's distribution."""
        return self.num_tolerated is None

    @property
    def num_own(self) -> int:
        """New tokens that are the target's own, given all before them."""
        return self.num_tokens - (self.num_tolerated or 0)

    @property
    def num_later(self) -> int:
        """New tokens that the passes after the prompt's gave."""
        return self.num_tokens - self.num_first

    @property
    def drafted(self) -> dict[str, int]:
        """Tokens that each member proposed."""
        return {name: counts.num_tokens for name, counts in self.proposals.items()}

    @property
    def accepted(self) -> dict[str, int]:
        """Tokens of each member that the verifier above it accepted."""
        return {name: sum(counts.accepted) for name, counts in self.proposals.items()}

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_accepted_length(self) -> float:
        """New tokens for each forward pass of the target after the prompt; 1 if none was made."""
        num_passes = next(iter(self.forward_passes.values()))
        return self.num_later / num_passes if num_passes else 1.0


@dataclass(frozen=True)
class Piece:
    """A part of an answer while it is made.

    `text` may be empty: in the middle of a character, or where a stop string may have begun. What
    was held back comes with a last piece, which has no tokens.

    Attributes:
        members: for each token, the member that proposed it first: the target where it drew a
            token that was not proposed, "ngram" for a copy, "grammar" for what a grammar foretold,
            "history" for a copy from earlier sequences.
        logprobs: for each token, if they were asked for.
    """

    text: str
    token_ids: list[int]
    members: list[str]
    logprobs: list[TokenLogprobs]


def unfinished() -> UserError:
    """The error of asking what an answer cost before its end."""
    return UserError("no statistics", "an answer that has not ended", "take all of its parts")


class Answer(Iterator[Part], Generic[Part]):
    """An answer's parts, made as they are asked for.

    Its request ends with the last part, and where the answer is closed or forgotten before.

    Args:
        parts: returns what the answer cost.
    """

    def __init__(self, parts: Generator[Part, None, Statistics]) -> None:
        self._parts = parts
        self._statistics: Statistics | None = None

    def __next__(self) -> Part:
        try:
            return next(self._parts)
        except StopIteration as end:
            self._statistics = end.value or self._statistics
            raise

    def close(self) -> None:
        """Give the rest up."""
        self._parts.close()

    @property
    def statistics(self) -> Statistics:
        """What the whole answer cost.

        Raises:
            UserError: its end has not been reached.
        """
        if self._statistics is None:
            raise unfinished()
        return self._statistics
