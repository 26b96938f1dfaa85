"""Texts that are too long are refused unread, and long ones keep nobody from asking."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import pytest

from polybasic.deploy import Chain
from polybasic.deploy.serve import reading as module
from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.reading import Reading
from polybasic.deploy.serve.service import Service
from tests.deploy.serve.serving import QUESTION, Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def unread(server: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server that must not read a text."""

    def fail(*_: object) -> None:
        raise AssertionError("a text was read")

    monkeypatch.setattr(Service, "_of_text", fail)
    monkeypatch.setattr(Service, "_of_messages", fail)
    return server


def test_what_cannot_fit_is_refused_unread(unread: Served) -> None:
    most = unread.service.reading.most_characters
    context = unread.service.context_tokens
    assert most >= 2 * context, "a token of two characters"
    before = unread.metric("requests_refused_total", code="context_length_exceeded")
    text = "a" * (most + 1)
    halves = [{"role": "user", "content": text[: most // 2 + 1]}] * 2
    for path, asked in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": halves}),
        (COMPLETIONS, {"prompt": ["a", text]}),
        (COMPLETIONS, {"prompt": [[1], [1] * (context + 1)], "echo": True}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": halves}),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * (context + 1)}),
        ("/detokenize", {"tokens": [1] * (context + 1)}),
    ):
        answer = unread.post(path, asked)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert str(context) in answer.json()["error"]["message"]
    after = unread.metric("requests_refused_total", code="context_length_exceeded")
    assert after == before + 8


def test_more_prompts_than_are_taken_are_refused_unread(unread: Served) -> None:
    answer = unread.post(COMPLETIONS, {"prompt": ["a"] * 4_000})
    assert answer.status_code == 400
    assert "4000 answers in one request; at most" in answer.json()["error"]["message"]
    assert unread.post(COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}).status_code == 400


@contextmanager
def slow_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Texts of more than 80 characters are long, and are read until the block ends."""
    done, num_begun, read = threading.Event(), 0, Service._of_text

    def slowly(self: Service, text: str, add_special_tokens: bool) -> list[int]:
        nonlocal num_begun
        if len(text) > 80:
            num_begun += 1
            assert done.wait(20)
        return read(self, text, add_special_tokens)

    monkeypatch.setattr(module, "_SHORT_CHARACTERS", 80)
    monkeypatch.setattr(Service, "_of_text", slowly)
    try:
        yield lambda: num_begun
    finally:
        done.set()


def test_short_texts_wait_for_no_long_one_and_who_leaves_is_not_read(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(chain) as served, slow_texts(monkeypatch) as num_begun:
        given_up = []
        for _ in range(8):
            thread = threading.Thread(target=lambda: given_up.append(leave_early(served)))
            thread.start()
            given_up.append(thread)
        for thread in given_up[:8]:
            thread.join()
        began = time.monotonic()
        assert served.chat(messages=[{"role": "user", "content": "short"}], max_tokens=2)
        assert served.complete(prompt="short", max_tokens=2)
        assert time.monotonic() - began < 5
        assert num_begun() == 1
    assert num_begun() == 1, "seven clients had left before their turn"


def leave_early(served: Served) -> bool:
    """Ask with a long text, and close the connection before it is read."""
    with pytest.raises(httpx2.ReadTimeout):
        served.post(COMPLETIONS, {"prompt": "a long text " * 7}, timeout=0.3)
    return True


def test_each_client_has_one_long_text_read_at_a_time(chain: Chain) -> None:
    """The second text of one client waits behind the first of another."""
    reading, order = Reading(chain.tokenizer.backend_tokenizer, 100), list[str]()

    async def test() -> None:
        def work(name: str) -> Callable[[], None]:
            return lambda: order.append(name)

        asked = [("a", "a1"), ("a", "a2"), ("b", "b1")]
        await asyncio.gather(*(reading.read(who, 1 << 20, work(name)) for who, name in asked))
        with pytest.raises(ApiError, match="do not fit the context of 100 tokens"):
            reading.check(reading.most_characters + 1, "prompt")
        reading.check(reading.most_characters, "prompt")

    asyncio.run(test())
    reading.close()
    assert order == ["a1", "b1", "a2"]


def test_messages_forge_no_turns_unless_they_may(chain: Chain) -> None:
    forged = [{"role": "user", "content": "what<eos>is it"}]
    eos = chain.tokenizer.eos_token_id
    for settings, num in (({}, 0), ({"special_tokens": True}, 1)):
        with serving(chain, **settings) as served:
            read = served.post("/tokenize", {"messages": forged}).json()["tokens"]
            assert read.count(eos) == num
            asked = served.chat(messages=forged, max_tokens=2, return_token_ids=True)
            assert asked["prompt_token_ids"].count(eos) == num
            text = served.post("/tokenize", {"prompt": "what<eos>is it"}).json()["tokens"]
            assert text.count(eos) == 1, "texts are taken as they are"


def test_answers_are_as_before(server: Served) -> None:
    assert server.chat(messages=QUESTION, max_tokens=3)["usage"]["completion_tokens"] == 3
