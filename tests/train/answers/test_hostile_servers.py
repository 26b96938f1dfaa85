"""Whatever a server answers, it takes no memory, no time and no traceback: the try has failed."""

import asyncio
import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.train.answers.answerer import AskedPrompt, FailedAnswer, WrittenTurn
from polybasic.train.answers.endpoint import open_endpoint
from polybasic.train.settings import RegenerateSettings
from tests.train.fake_endpoint import FakeEndpoint, Fault, completion, serve

PROMPT = AskedPrompt([{"role": "user", "content": "Why?"}], [1], 10, 0.0, 1)
SECONDS = 2.0


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve() as served:
        yield served


def answered(endpoint: FakeEndpoint) -> WrittenTurn:
    settings = RegenerateSettings(endpoint=endpoint.url, num_retries=0, timeout_seconds=SECONDS)

    async def ask() -> WrittenTurn:
        async with open_endpoint(settings, 4096) as opened:
            return await opened.answer(PROMPT)

    return asyncio.run(ask())


def answer_with(**changes: object) -> bytes:
    content = completion("text", "stop")
    content["choices"][0] |= changes
    return json.dumps(content).encode()


NESTED = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "reason is a list": Fault(200, answer_with(finish_reason=["stop"])),
    "reason is long": Fault(200, answer_with(finish_reason="stop" * 1000)),
    "content is a list": Fault(200, answer_with(message={"content": ["text"]})),
    "message is a word": Fault(200, answer_with(message="text")),
    "nested": Fault(200, b'{"choices": ' + NESTED + b"}"),
    "nested beside": Fault(200, answer_with()[:-1] + b', "x": ' + NESTED + b"}"),
    "nested error": Fault(400, b'{"error": ' + NESTED + b"}"),
    "long number": Fault(200, b'{"choices": ' + b"9" * 10_000 + b"}"),
    "all bytes": Fault(200, bytes(range(256))),
    "long": Fault(200, b'{"choices": "' + b"x" * (64 << 20) + b'"}'),
    "long error": Fault(500, b"x" * (64 << 20)),
    "packed": Fault(200, gzip.compress(b" " * (1 << 26)), {"Content-Encoding": "gzip"}),
    "dripping": Fault(200, b"{", {"Content-Length": "1000000"}, drips=True),
}


def test_a_plain_answer_is_taken(endpoint: FakeEndpoint) -> None:
    assert answered(endpoint) == WrittenTurn("turn 0 about Why?", is_cut=False)
    endpoint.faults = {"Why?": [Fault(200, answer_with(message={"content": None}))]}
    assert answered(endpoint) == WrittenTurn("", is_cut=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_a_failed_one(endpoint: FakeEndpoint, name: str) -> None:
    endpoint.faults = {"Why?": [HOSTILE[name]]}
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(FailedAnswer) as failed:
            answered(endpoint)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5 * SECONDS
    assert len(str(failed.value)) < 300


@pytest.mark.parametrize(
    "entry", [{"id": "tiny", "max_model_len": "many"}, {"id": ["tiny"]}, {"id": "t" * 5000}, "tiny"]
)
def test_a_list_of_models_in_another_form_is_refused(endpoint: FakeEndpoint, entry: object) -> None:
    endpoint.models = [entry]
    with pytest.raises(UserError, match=r"endpoint does not answer: .*another format than OpenAI"):
        answered(endpoint)


def test_a_list_of_models_that_does_not_end_is_refused(endpoint: FakeEndpoint) -> None:
    endpoint.always = HOSTILE["dripping"]
    with pytest.raises(UserError, match=r"endpoint does not answer: .*no answer in time"):
        answered(endpoint)
