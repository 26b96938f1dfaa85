"""The one thread that runs the chain for all requests: who is next, how far, and who gave up."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.live import LiveAnswer
from polybasic.deploy.runtime.request import Piece, Statistics
from polybasic.deploy.runtime.slots import BusyError
from polybasic.deploy.serve.api.errors import (
    ApiError,
    bad_request,
    internal_error,
    out_of_time,
    shutting_down,
)
from polybasic.deploy.serve.learning import Learner
from polybasic.deploy.serve.metrics import Metrics
from polybasic.deploy.serve.tickets import Job, News, RequestHandle

_log = logging.getLogger(__name__)

_FAILURES_UNTIL_BROKEN = 3
"""Answers that fail one after another, with none between them that ends well."""
_LOOK_SECONDS = 0.1
"""Between two looks at who takes too long."""
_SEND_SECONDS = 0.01
"""Between two parts of a stream, which hold more than one pass where those are faster: what a part
costs, in both processes, is time that passes lack."""
_IDLE_SECONDS = 0.01
"""Until an engine that others keep busy is asked again."""


@dataclass(frozen=True)
class Limits:
    """How much is taken at a time.

    Attributes:
        sequences: answers that are made at a time.
        queue: answers that may wait.
        queued_tokens: of the prompts that may wait.
        seconds: from the arrival of a request to the end of its last answer.
    """

    sequences: int
    queue: int
    queued_tokens: int
    seconds: float


@dataclass
class _State:
    """What both threads look at, under the scheduler's lock."""

    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    gone: set[RequestHandle] = field(default_factory=set)
    is_draining: bool = False
    is_stopping: bool = False


class Scheduler:
    """Runs a chain's answers in a thread of its own.

    Its public methods are called in the event loop that `start` was called in.

    Args:
        learner: learns from answers while there are none to make.

    Attributes:
        is_broken: whether it has failed.
        lost: why it cannot go on, if another process of the chain has ended.
        when_lost: called in its thread then.
    """

    def __init__(
        self, chain: Chain, metrics: Metrics, limits: Limits, learner: Learner | None = None
    ) -> None:
        self.chain, self.metrics, self.limits = chain, metrics, limits
        self._learner, self._may_learn = learner, learner is not None
        self._state = _State()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="polybasic-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[tuple[RequestHandle, News | ApiError]] = []
        self._is_urgent = False
        self._sent_at = self._looked_at = 0.0
        self._num_failures = 0
        self._seconds_an_answer = 1.0
        self.is_broken = False
        self.lost: LostProcessError | None = None
        self.when_lost: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Begin to take requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not (self.is_broken or self._state.is_draining) and self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether no answer runs or waits."""
        return not (self._state.waiting or self._state.running)

    def submit(self, ticket: RequestHandle) -> None:
        """Take a request.

        Raises:
            ApiError: it can never be taken (400), or not now (503).
        """
        limits, num, tokens = self.limits, len(ticket.jobs), ticket.num_tokens
        self.check_number(num)
        with self._changed:
            state = self._state
            if self.is_broken or not self._thread.is_alive():
                raise ApiError(503, "the engine has failed; see /health", code="engine_failed")
            if state.is_draining:
                raise shutting_down()
            free = limits.sequences - len(state.running) - len(state.waiting)
            queued = sum(len(job.prompt) for job in state.waiting)
            if num > free and (
                num > free + limits.queue or (queued and queued + tokens > limits.queued_tokens)
            ):
                raise self._full()
            state.waiting += ticket.jobs
            self._show()
            self._changed.notify()

    def check_number(self, num: int) -> None:
        """Check how many answers a request asks for.

        Raises:
            ApiError: more than can ever be taken (400).
        """
        most = self.limits.queue + self.limits.sequences
        if num > most:
            raise bad_request(f"{num} answers in one request; at most {most} are taken", "n")

    def cancel(self, ticket: RequestHandle) -> None:
        """Give a request up, whatever has become of it; its sequences are free after this pass."""
        if ticket.is_over:
            return
        with self._changed:
            self._state.gone.add(ticket)
            self._changed.notify()

    def drain(self) -> None:
        """Take no more requests; those of which an answer has begun are answered."""
        with self._changed:
            self._state.is_draining = True
            self._changed.notify()

    async def stop(self) -> None:
        """End at once; what was not answered gets an error."""
        with self._changed:
            self._state.is_draining = self._state.is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _full(self) -> ApiError:
        ahead = len(self._state.waiting) / self.limits.sequences
        seconds = max(1, min(60, round(ahead * self._seconds_an_answer)))
        message = f"the queue is full; try again in {seconds} s"
        return ApiError(503, message, code="queue_full", headers={"Retry-After": str(seconds)})

    # In the thread

    def _run(self) -> None:
        try:
            while not self._state.is_stopping:
                self._turn()
        except Exception as error:
            self.is_broken = True
            if isinstance(error, LostProcessError):
                self.lost = error  # which ends the server with one line
            else:
                _log.exception("the scheduler failed")
            failure = ApiError(500, "the engine has failed", code="engine_failed")
        else:
            failure = shutting_down()
        with self._changed:
            left = self._state.running + self._state.waiting
            self._state.waiting, self._state.running = [], []
        for job in left:
            self._end(job, failure, "abort")
        self._send(time.monotonic())
        if self.lost is not None:
            self.when_lost()

    def _turn(self) -> None:
        with self._changed:
            state = self._state
            while not (self._has_work or self._may_learn):
                self._changed.wait()
            is_asked = self._has_work
            if state.gone or time.monotonic() - self._looked_at > _LOOK_SECONDS:
                self._drop()
        if not is_asked:
            self._learn()
            return
        self._admit()
        moved = self._step() if state.running else False
        now = time.monotonic()
        self._gather(now)
        if self._is_urgent or not moved or now - self._sent_at > _SEND_SECONDS:
            self._send(now)
        if not moved:
            with self._changed:
                if (state.waiting or state.running) and not state.gone:
                    self._changed.wait(_IDLE_SECONDS)

    @property
    def _has_work(self) -> bool:
        """Whether there is anything to do for a client, or to end."""
        state = self._state
        return bool(state.waiting or state.running or state.gone or state.is_stopping)

    def _learn(self) -> None:
        """Do a piece of a learner's work while nobody waits; one that fails learns no more."""
        assert self._learner is not None
        began = time.monotonic()
        try:
            self._may_learn = self._learner.work()
        except Exception as error:
            told = None if isinstance(error, UserError) else error
            _log.error("learning has ended: %s", error, exc_info=told)
            self._learner, self._may_learn = None, False
            return
        self.metrics.learning(self._learner.progress, time.monotonic() - began)

    def _drop(self) -> None:
        """Give up what was cancelled or takes too long."""
        state, self._looked_at = self._state, time.monotonic()
        late = self._looked_at - self.limits.seconds
        for job in [*state.waiting, *state.running]:
            if job.ticket in state.gone:
                self._end(job, None, "abort")
            elif job.ticket.arrived < late:
                self._end(job, out_of_time(self.limits.seconds), "error")
            elif state.is_draining and not job.ticket.has_begun:
                self._end(job, shutting_down(), "abort")
        state.gone.clear()

    def _admit(self) -> None:
        """Give free sequences to those who wait: to the client with the fewest, then in order."""
        while (job := self._next()) is not None:
            try:
                job.live = self.chain.begin(job.prompt, **job.options)
            except BusyError:  # by others who use this chain
                return
            except UserError as error:
                self._end(job, bad_request(readable(error, self.chain)), "error")
                continue
            except Exception as error:
                self._end(job, self._failure(job, error), "error")
                continue
            with self._changed:
                self._state.waiting.remove(job)
                self._state.running.append(job)
                self._show()
            self.metrics.queue_time.observe(time.monotonic() - job.ticket.arrived)
            self.metrics.prompt_tokens.inc(len(job.prompt))

    def _next(self) -> Job | None:
        with self._changed:
            state = self._state
            if not state.waiting or len(state.running) >= self.limits.sequences:
                return None
            running = Counter(job.ticket.client for job in state.running)
            return min(state.waiting, key=lambda job: running[job.ticket.client])

    def _step(self) -> bool:
        try:
            return self.chain.step()
        except Exception as error:
            for job in list(self._state.running):
                self._end(job, self._failure(job, error), "error")
            return True

    def _failure(self, job: Job, error: BaseException) -> ApiError:
        """What a client is told of an answer that failed; the log has the rest."""
        if isinstance(error, LostProcessError):
            raise error
        extra = {"request_id": job.ticket.request_id}
        if isinstance(error, UserError):
            _log.error("an answer failed: %s", error, extra=extra)
            return ApiError(500, readable(error, self.chain), code="model_failed")
        _log.error("an answer failed", extra=extra, exc_info=error)
        self._num_failures += 1
        self.is_broken = self._num_failures >= _FAILURES_UNTIL_BROKEN
        return internal_error(job.ticket.request_id)

    def _gather(self, now: float) -> None:
        """Collect what the step made."""
        for job in list(self._state.running):
            live = job.live
            assert live is not None
            is_over, pieces = live.is_over, live.take()
            if pieces:
                self._measure(job, pieces, now)
            if is_over and live.error is not None:
                self._end(job, self._failure(job, live.error), "error")
            elif is_over:
                self._finish(job, live.statistics, now)
                self._tell(job, live, pieces, live.statistics)
            elif pieces:
                self._tell(job, live, pieces, None)

    def _tell(
        self, job: Job, live: LiveAnswer, pieces: list[Piece], ended: Statistics | None
    ) -> None:
        news = News(job.index, pieces, ended, live.prompt_logprobs, live.passes)
        self._outbox.append((job.ticket, news))

    def _finish(self, job: Job, statistics: Statistics, now: float) -> None:
        self._num_failures = 0
        seconds = now - job.ticket.arrived
        self._seconds_an_answer += (seconds - self._seconds_an_answer) / 8
        self.metrics.latency.observe(seconds)
        self.metrics.cost(statistics)
        # the text of a lossy plan is not the target's own
        if self._learner is not None and statistics.num_tolerated is None:
            self._learner.add(job.prompt, job.token_ids)
            self._may_learn = True
        self._is_urgent = True
        self._remove(job, "length" if statistics.stopped_by == "length" else "stop")

    def _end(self, job: Job, error: ApiError | None, reason: str) -> None:
        """End a job before its time."""
        if job.live is not None:
            job.live.close()
            self.metrics.cost(job.live.spent)
        self._remove(job, reason)
        if error is not None:
            self._is_urgent = True
            self._outbox.append((job.ticket, error))

    def _remove(self, job: Job, reason: str) -> None:
        with self._changed:
            for jobs in (self._state.waiting, self._state.running):
                if job in jobs:
                    jobs.remove(job)
            self._show()
        self.metrics.ended(reason)

    def _measure(self, job: Job, pieces: list[Piece], now: float) -> None:
        new = [token for piece in pieces for token in piece.token_ids]
        num = len(new)
        job.token_ids += new
        self.metrics.generation_tokens.inc(num)
        if job.first_at is None:
            job.first_at, self._is_urgent = now, True
            self.metrics.first_token.observe(now - job.ticket.arrived)
        else:
            for _ in range(num):
                self.metrics.between_tokens.observe((now - job.last_at) / num)
        job.last_at = now

    def _send(self, now: float) -> None:
        """Hand everything to the event loop in one call."""
        outbox, self._outbox = self._outbox, []
        self._is_urgent, self._sent_at = False, now
        if outbox:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(_deliver, outbox)
            except RuntimeError:  # the loop is closed, and nobody waits any more
                _log.debug("%d deliveries after the end", len(outbox))

    def _show(self) -> None:
        self.metrics.running.set(len(self._state.running))
        self.metrics.waiting.set(len(self._state.waiting))


def _deliver(outbox: list[tuple[RequestHandle, News | ApiError]]) -> None:
    for ticket, news in outbox:
        ticket.deliver(news)


def readable(error: UserError, chain: Chain) -> str:
    """A user error for a client, without the paths of this machine."""
    text = str(error)
    for path in (chain.target_folder, chain.folder, chain.tokenizer.name_or_path):
        if str(path) not in ("", "."):
            text = text.replace(str(path), "the chain")
    return text
