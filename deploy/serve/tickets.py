"""A request on its way through the scheduler, and what comes of it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polybasic.deploy.runtime.live import LiveAnswer
from polybasic.deploy.runtime.request import Piece, Statistics
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.serve.api.errors import ApiError


@dataclass(frozen=True)
class News:
    """What came of one of a request's answers.

    Attributes:
        index: of the answer in its request.
        pieces: since the last news.
        statistics: once it has ended.
        prompt_logprobs: of the prompt's tokens but the first, where they were asked for.
        passes: of each member so far, by name, without the prefill.
    """

    index: int
    pieces: list[Piece]
    statistics: Statistics | None
    prompt_logprobs: list[TokenLogprobs]
    passes: dict[str, int]


@dataclass(eq=False)
class Job:
    """One answer, from its place in the queue to its end.

    Attributes:
        token_ids: of the answer so far.
    """

    ticket: "RequestHandle"
    index: int
    prompt: list[int]
    options: dict[str, Any]
    live: LiveAnswer | None = None
    first_at: float | None = None
    last_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class RequestHandle:
    """A request's answers, and what the scheduler says of them.

    Args:
        request_id: for the log.
        client: whose turn it is counts by these.
        asked: prompt and options of `Chain.begin`, for each answer.
    """

    def __init__(
        self, request_id: str, client: str, asked: Sequence[tuple[list[int], dict[str, Any]]]
    ) -> None:
        self.request_id, self.client = request_id, client
        self.jobs = [Job(self, index, *each) for index, each in enumerate(asked)]
        self.arrived = time.monotonic()
        self._news: list[News] = []
        self._error: ApiError | None = None
        self._num_left = len(self.jobs)
        self._has_news = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Of its prompts."""
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def is_over(self) -> bool:
        """Whether all of its answers have ended and were taken."""
        return self._num_left == 0

    @property
    def has_begun(self) -> bool:
        """Whether one of its answers has had a sequence."""
        return any(job.live is not None for job in self.jobs)

    async def news(self) -> list[News]:
        """What has come since the last call; waits for it. Empty once all answers have ended.

        Raises:
            ApiError: one of them failed.
        """
        if self.is_over:
            return []
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, []
        self._num_left -= sum(update.statistics is not None for update in news)
        return news

    def deliver(self, news: "News | ApiError") -> None:
        """Called in the event loop."""
        if isinstance(news, ApiError):
            self._error = self._error or news
        elif self._news and self._news[-1].index == news.index:
            pieces = self._news[-1].pieces + news.pieces
            self._news[-1] = replace(news, pieces=pieces)
        else:
            self._news.append(news)
        self._has_news.set()
