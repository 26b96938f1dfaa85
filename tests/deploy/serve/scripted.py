"""A chain whose steps a test decides, for the scheduler around it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.request import Piece, Statistics
from polybasic.deploy.serve.learning import Learner
from polybasic.deploy.serve.metrics import Metrics
from polybasic.deploy.serve.scheduler import Limits, Scheduler
from polybasic.deploy.serve.tickets import News, RequestHandle

STATISTICS = Statistics(3, 2, 0.5, 0.1, {"target": 2}, {"target": 0.4}, {"target": [1, 1]}, "stop")


@dataclass
class ScriptedAnswer:
    """Gains a token a step until it has as many as its prompt's first number says."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    taken: int = 0
    is_over: bool = False
    is_closed: bool = False
    error: BaseException | None = None
    statistics: Statistics = STATISTICS
    spent: Statistics = STATISTICS
    prompt_logprobs: list[Any] = field(default_factory=list)

    @property
    def passes(self) -> dict[str, int]:
        return {"target": len(self.token_ids)}

    def take(self) -> list[Piece]:
        new, self.taken = self.token_ids[self.taken :], len(self.token_ids)
        return [Piece("".join(map(chr, new)), new, ["target"] * len(new), [])] if new else []

    def close(self) -> None:
        self.is_over = self.is_closed = True


class ScriptedChain:
    """Stands for a chain; a step waits until the test lets it run."""

    folder = target_folder = Path("/somewhere/chain")
    tokenizer = SimpleNamespace(name_or_path="/somewhere/chain/tokenizer")

    def __init__(self) -> None:
        self.begun: list[ScriptedAnswer] = []
        self.steps = threading.Semaphore(0)
        self.failures: list[BaseException] = []
        self.num_steps = 0

    def begin(self, prompt: list[int], **options: Any) -> ScriptedAnswer:
        if prompt == [13]:
            raise UserError("not wanted", f"{self.folder}", "ask for something else")
        self.begun.append(ScriptedAnswer(prompt))
        return self.begun[-1]

    def step(self) -> bool:
        if not self.steps.acquire(timeout=10):
            raise TimeoutError("no step was let run")
        self.num_steps += 1
        if self.failures:
            raise self.failures.pop()
        running = [answer for answer in self.begun if not answer.is_over]
        for answer in running:
            answer.token_ids.append(64 + len(answer.token_ids))
            answer.is_over = len(answer.token_ids) >= answer.prompt[0]
        return bool(running)

    def run(self, num: int) -> None:
        """Let so many steps run."""
        self.steps.release(num)


@asynccontextmanager
async def scheduling(
    chain: Any,
    sequences: int = 2,
    queue: int = 100,
    queued_tokens: int = 1000,
    seconds: float = 60,
    learner: Learner | None = None,
) -> AsyncIterator[Scheduler]:
    """A scheduler that runs as long as the block."""
    limits = Limits(sequences, queue, queued_tokens, seconds)
    scheduler = Scheduler(chain, Metrics("tiny"), limits, learner)
    scheduler.start()
    try:
        yield scheduler
    finally:
        chain.run(1000)
        await scheduler.stop()


def ticket(client: str, *lengths: int, prompt_tokens: int = 1) -> RequestHandle:
    """A request of a client, with an answer of each length."""
    return RequestHandle(f"of {client}", client, [([num] * prompt_tokens, {}) for num in lengths])


async def whole(asked: RequestHandle) -> list[News]:
    """All that comes of a request, within ten seconds."""
    found: list[News] = []
    async with asyncio.timeout(10):
        while news := await asked.news():
            found += news
    return found


async def until(condition: Any) -> None:
    """Wait until it holds, at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)
