"""Answers while they are made: text, tokens, and which member proposed them."""

from dataclasses import dataclass

from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.request import Piece, Statistics
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: the new tokens, with the stop token or the tokens of the stop string.
        statistics: what it cost.
        members: for each token, the member that proposed it first: the target where it drew a
            token that was not proposed, "ngram" for a copy, "grammar" for what a grammar foretold,
            "history" for a copy from earlier sequences.
        logprobs: for each token, if they were asked for.
        prompt_logprobs: for each of the prompt's tokens but the first, if they were asked for.
    """

    text: str
    token_ids: list[int]
    statistics: Statistics
    members: list[str]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class LiveAnswer:
    """An answer that has a sequence of the engine; made by `Chain.begin`, run by `Chain.step`.

    Attributes:
        token_ids: of the prompt.
    """

    def __init__(self, running: ActiveSequence) -> None:
        self._running = running
        self.token_ids = running.request.token_ids

    def take(self) -> list[Piece]:
        """What was made since the last call. Neither computes nor waits."""
        return self._running.take()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, failed or was closed; `take` may still have its last pieces."""
        return self._running.is_over

    @property
    def error(self) -> BaseException | None:
        """What made it fail."""
        return self._running.error

    @property
    def statistics(self) -> Statistics:
        """What it cost.

        Raises:
            UserError: it has not ended; or whatever made it fail.
        """
        return self._running.statistics

    @property
    def spent(self) -> Statistics:
        """What it has cost so far, or by its end, however it has ended: of an answer that was given
        up or has failed without the seconds of members."""
        return self._running.spent

    @property
    def passes(self) -> dict[str, int]:
        """Of each member that has run, by name, without the prefill: those so far."""
        return self._running.passes

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the prompt's tokens but the first, with the first piece or the end, if asked for."""
        return self._running.prompt_logprobs

    @property
    def members(self) -> tuple[str, ...]:
        """That run now."""
        return self._running.request.plan.members

    def close(self) -> None:
        """Give the rest up; its sequence is free after the pass that is under way."""
        self._running.close()
