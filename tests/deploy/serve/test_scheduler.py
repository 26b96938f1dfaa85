"""Who is next, what is refused, what is given up, and what a failure leaves."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.learning import Progress
from polybasic.deploy.serve.scheduler import Scheduler
from tests.deploy.serve.scripted import ScriptedChain, scheduling, ticket, until, whole


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def sample(scheduler: Scheduler, name: str, **labels: str) -> float:
    """Of the metrics."""
    found = scheduler.metrics.registry.get_sample_value(
        f"polybasic:{name}", {"model_name": "tiny", **labels}
    )
    return found or 0.0


def test_answers_come_in_pieces_and_end() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain) as scheduler:
            asked = ticket("a", 3, 2)
            scheduler.submit(asked)
            chain.run(10)
            news = await whole(asked)
        texts = ["", ""]
        for update in news:
            texts[update.index] += "".join(piece.text for piece in update.pieces)
        assert texts == ["@AB", "@A"]
        assert sorted(update.index for update in news if update.statistics) == [0, 1]
        assert asked.is_over
        assert sample(scheduler, "request_success_total", finished_reason="stop") == 2
        assert sample(scheduler, "generation_tokens_total") == 5
        assert sample(scheduler, "time_to_first_token_seconds_count") == 2
        assert sample(scheduler, "inter_token_latency_seconds_count") == 3

    run(test())


def test_the_first_piece_comes_at_once_and_the_next_ones_together() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain) as scheduler:
            scheduler.submit(asked := ticket("a", 300))
            chain.run(1)
            [first] = await asked.news()
            assert (first.pieces[0].token_ids, first.statistics) == ([64], None)
            assert first.passes == {"target": 1}
            chain.run(299)
            news = await whole(asked)
            assert len(news) < 100
            assert news[-1].passes == {"target": 300}
            told = [
                token for update in news for piece in update.pieces for token in piece.token_ids
            ]
            assert told == list(range(65, 364))

    run(test())


def test_the_client_with_the_fewest_running_is_next() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=2) as scheduler:
            many = [ticket("greedy", 3 + index) for index in range(5)]
            for each in many:
                scheduler.submit(each)
            await until(lambda: len(chain.begun) == 2)
            modest = ticket("modest", 50)
            scheduler.submit(modest)
            chain.run(3)
            await until(lambda: len(chain.begun) == 3)
            # the one that came last is next, and the others follow in their order
            assert [answer.prompt[0] for answer in chain.begun] == [3, 4, 50]
            chain.run(20)
            for each in many:
                await whole(each)
            assert [answer.prompt[0] for answer in chain.begun] == [3, 4, 50, 5, 6, 7]
            scheduler.cancel(modest)

    run(test())


def test_a_full_queue_is_told_with_a_time() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1, queue=2, queued_tokens=10) as scheduler:
            first = ticket("a", 9)
            scheduler.submit(first)
            await until(lambda: len(chain.begun) == 1)
            assert sample(scheduler, "num_requests_running") == 1
            scheduler.submit(ticket("b", 1, prompt_tokens=6))
            assert sample(scheduler, "num_requests_waiting") == 1
            with pytest.raises(ApiError) as too_many_tokens:
                scheduler.submit(ticket("c", 1, prompt_tokens=5))
            scheduler.submit(ticket("c", 1, prompt_tokens=4))
            with pytest.raises(ApiError) as too_many:
                scheduler.submit(ticket("d", 1))
            for caught in (too_many, too_many_tokens):
                assert (caught.value.status, caught.value.code) == (503, "queue_full")
                assert int(caught.value.headers["Retry-After"]) >= 1
            with pytest.raises(ApiError, match="at most 3 are taken"):
                scheduler.submit(ticket("d", 1, 1, 1, 1))
            chain.run(20)
            await whole(first)
            await until(lambda: scheduler.is_idle)
            scheduler.submit(late := ticket("d", 1))
            await whole(late)

    run(test())


def test_who_gives_up_is_gone_after_one_step() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1) as scheduler:
            running, waiting, last = ticket("a", 99), ticket("b", 99), ticket("c", 1)
            for each in (running, waiting, last):
                scheduler.submit(each)
            chain.run(3)
            await until(lambda: chain.num_steps == 3)
            scheduler.cancel(waiting)
            scheduler.cancel(running)
            # the step that is under way, and the one of the answer that was waiting
            chain.run(2)
            await whole(last)
            assert [answer.prompt[0] for answer in chain.begun] == [99, 1]
            assert chain.begun[0].is_closed
            assert len(chain.begun[0].token_ids) == 4
            assert sample(scheduler, "request_success_total", finished_reason="abort") == 2
            # of the one that was given up, too
            assert sample(scheduler, "forward_passes_total", member="target") == 2 * 2

    run(test())


def test_a_request_has_a_time() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1, seconds=0.2) as scheduler:
            running, waiting = ticket("a", 99), ticket("b", 99)
            scheduler.submit(running)
            scheduler.submit(waiting)
            await asyncio.sleep(0.25)
            chain.run(1)
            for each in (running, waiting):
                with pytest.raises(ApiError, match=r"longer than 0\.2 s") as caught:
                    await whole(each)
                assert caught.value.status == 504
            assert len(chain.begun) == 1
            assert chain.begun[0].is_closed

    run(test())


def test_a_failing_step_ends_its_answers_and_no_others(caplog) -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1) as scheduler:
            chain.failures = [ValueError("wires crossed in /somewhere/secret.py")]
            failing, next_one = ticket("a", 2), ticket("b", 2)
            scheduler.submit(failing)
            scheduler.submit(next_one)
            chain.run(3)
            with pytest.raises(ApiError) as caught:
                await whole(failing)
            told = str(caught.value.body)
            assert caught.value.status == 500
            assert "of a" in told
            assert "secret" not in told
            assert "wires" not in told
            await whole(next_one)
            assert not scheduler.is_broken
            assert scheduler.is_ready
            assert sample(scheduler, "request_success_total", finished_reason="error") == 1

    with caplog.at_level(logging.ERROR):
        run(test())
    [record] = [logged for logged in caplog.records if logged.levelno == logging.ERROR]
    assert record.request_id == "of a"
    assert "wires crossed" in caplog.text


def test_an_engine_that_fails_again_and_again_is_broken() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1) as scheduler:
            chain.failures = [ValueError("wires crossed")] * 3
            chain.run(3)
            for index in range(3):
                assert not scheduler.is_broken
                scheduler.submit(asked := ticket(f"{index}", 2))
                with pytest.raises(ApiError, match="the server failed on this request"):
                    await whole(asked)
            assert scheduler.is_broken
            assert not scheduler.is_ready
            with pytest.raises(ApiError) as caught:
                scheduler.submit(ticket("late", 1))
            assert caught.value.code == "engine_failed"

    run(test())


def test_what_the_engine_refuses_is_the_requests_fault() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain) as scheduler:
            scheduler.submit(asked := ticket("a", 13))
            with pytest.raises(ApiError) as caught:
                await whole(asked)
            assert caught.value.status == 400
            assert caught.value.message == "not wanted: the chain; ask for something else"
            scheduler.submit(other := ticket("a", 1))
            chain.run(1)
            await whole(other)

    run(test())


def test_draining_answers_what_has_begun_and_nothing_else() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1) as scheduler:
            # of the first request one answer runs, the other waits
            taken, queued = ticket("a", 4, 4), ticket("b", 2)
            for each in (taken, queued):
                scheduler.submit(each)
            await until(lambda: len(chain.begun) == 1)
            scheduler.drain()
            await asyncio.sleep(0.11)  # a look at who waits is due
            chain.run(2)
            with pytest.raises(ApiError, match="is shutting down"):
                await whole(queued)
            assert not scheduler.is_ready
            with pytest.raises(ApiError) as caught:
                scheduler.submit(ticket("c", 1))
            assert (caught.value.status, caught.value.code) == (503, "shutting_down")
            chain.run(8)
            await whole(taken)

    run(test())


def test_stopping_tells_those_who_wait() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        async with scheduling(chain, sequences=1) as scheduler:
            running, waiting = ticket("a", 99), ticket("b", 99)
            scheduler.submit(running)
            scheduler.submit(waiting)
            await until(lambda: len(chain.begun) == 1)
            chain.run(1)
            await scheduler.stop()
            for each in (running, waiting):
                with pytest.raises(ApiError, match="shutting down"):
                    await whole(each)
            assert chain.begun[0].is_closed

    run(test())


class CountingLearner:
    """Does a piece of work for each token of the answers that it was given."""

    def __init__(self, chain: ScriptedChain, failure: Exception | None = None) -> None:
        self.chain, self.failure = chain, failure
        self.texts: list[tuple[list[int], list[int]]] = []
        self.num_left = self.num_done = 0
        self.was_busy = False

    @property
    def progress(self) -> Progress:
        return Progress(self.num_done, 1, 1.5, 2.5)

    def add(self, prompt: list[int], answer: list[int]) -> None:
        self.texts.append((prompt, answer))
        self.num_left += len(answer)

    def work(self) -> bool:
        self.was_busy |= any(not answer.is_over for answer in self.chain.begun)
        if not self.num_left:
            return False
        if self.failure is not None:
            raise self.failure
        self.num_left, self.num_done = self.num_left - 1, self.num_done + 1
        return True


def test_it_learns_from_answers_while_nobody_asks() -> None:
    async def test() -> None:
        chain = ScriptedChain()
        learner = CountingLearner(chain)
        async with scheduling(chain, learner=learner) as scheduler:
            scheduler.submit(asked := ticket("a", 3, 2))
            chain.run(10)
            await whole(asked)
            await until(lambda: learner.num_done == 5)
            scheduler.submit(given_up := ticket("b", 400))
            await until(lambda: len(chain.begun) == 3)
            scheduler.cancel(given_up)
            chain.run(10)
            scheduler.submit(asked := ticket("c", 4))
            await whole(asked)
            await until(lambda: learner.num_done == 9)
        assert sorted(learner.texts) == [
            ([2], [64, 65]),
            ([3], [64, 65, 66]),
            ([4], [64, 65, 66, 67]),
        ]
        assert not learner.was_busy
        assert sample(scheduler, "learned_tokens") == 9
        assert sample(scheduler, "learning_tokens_a_round", weights="learned") == 2.5

    run(test())


@pytest.mark.parametrize("is_told", [True, False])
def test_learning_that_fails_ends_and_answers_go_on(
    is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failure = UserError("disk full", "/somewhere", "free some") if is_told else ValueError("what")

    async def test() -> None:
        chain = ScriptedChain()
        learner = CountingLearner(chain, failure)
        async with scheduling(chain, learner=learner) as scheduler:
            chain.run(20)
            for _ in range(3):
                scheduler.submit(asked := ticket("a", 3))
                await whole(asked)
            await until(lambda: "learning has ended" in caplog.text)
            assert scheduler.is_ready

    run(test())
    assert caplog.text.count("learning has ended") == 1
    assert ("Traceback" in caplog.text) == (not is_told)
