"""Keys, request ids, bodies that lie or crawl, clients that go away, and what answers give away."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polybasic.deploy import Chain
from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.api.protocol import ChatRequest
from polybasic.deploy.serve.api.streams import EventStream
from polybasic.deploy.serve.buffers import SMALL_BYTES, Buffers
from polybasic.deploy.serve.guard import ClientGone
from polybasic.deploy.serve.service import Service
from polybasic.deploy.serve.settings import ServeSettings
from tests.deploy.serve.serving import QUESTION, Served, serving

CHAT = "/v1/chat/completions"
LONG = {"messages": QUESTION, "ignore_eos": True, "temperature": 1.0}
KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def guarded(chain: Chain) -> Iterator[Served]:
    """A server with keys, and with small limits."""
    with serving(
        chain,
        api_keys=KEYS,
        body_bytes=2000,
        body_seconds=0.5,
        allowed_origins=("https://example.org",),
    ) as served:
        yield served


def test_a_server_is_asked_by_its_names_alone(chain: Chain) -> None:
    with serving(chain, allowed_hosts=("localhost", "::1")) as served:
        for host, status in (
            ("localhost", 200),
            ("LOCALHOST:8000", 200),
            ("[::1]:8000", 200),
            ("evil.example", 403),
            ("localhost.evil.example", 403),
            ("[::1", 403),
            ("", 403),
        ):
            answer = served.get("/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
        refused = served.get("/v1/models", headers={"Host": "evil.example"}).json()["error"]
        assert refused["code"] == "host_not_allowed"
        assert "--allowed-hosts" in refused["message"]


def bearer(key: str) -> dict[str, str | bytes]:
    return {"Authorization": b"Bearer " + key.encode()}  # type: ignore[dict-item]


def raw(server: Served, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a socket gets that was sent these parts."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as made:
        for part in parts:
            made.sendall(part)
            time.sleep(pause)
        found = b""
        with contextlib.suppress(ConnectionResetError):  # what was not read yet is given up
            while b"}" not in found and (new := made.recv(65536)):
                found += new
    return found


def head(length: str, key: str = KEYS[0]) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    ).encode()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_keys(guarded: Served) -> None:
    asked = {"messages": QUESTION, "max_tokens": 2}
    for key in KEYS:
        assert guarded.post(CHAT, asked, headers=bearer(key)).status_code == 200
    wrong: list[dict[str, Any]] = [
        {},
        bearer("first-ke"),
        bearer("first-key2"),
        bearer("FIRST-KEY"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-Api-Key": "first-key"},
    ]
    for headers in wrong:
        answer = guarded.post(CHAT, asked, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert guarded.get(path).status_code == 401
        assert guarded.get(path, headers=bearer(KEYS[1])).status_code == 200
    for path in ("/health", "/ready", "/version"):
        assert guarded.get(path).status_code == 200


def test_every_key_is_compared(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(key: bytes, given: bytes) -> bool:
        compared.append(key)
        return key == given

    monkeypatch.setattr("polybasic.deploy.serve.guard.hmac.compare_digest", compare)
    assert guarded.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200
    assert compared == [key.encode() for key in KEYS]


def test_request_ids(server: Served) -> None:
    asked = {"messages": QUESTION, "max_tokens": 2}
    given = server.post(CHAT, asked, headers={"X-Request-Id": "mine-1:2.3"})
    assert given.headers["x-request-id"] == "mine-1:2.3"
    made = [server.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for odd in ("a b", "x" * 129, "a\tb", ""):
        answer = server.get("/nowhere", headers={"X-Request-Id": odd})
        assert answer.headers["x-request-id"] not in ("", odd)


def test_large_bodies(guarded: Served) -> None:
    large = json.dumps({"messages": [{"role": "user", "content": "a" * 2000}]}).encode()
    client, headers = guarded.client, bearer(KEYS[0])
    answer = client.post(CHAT, content=large, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    parts = iter([large[:1000], large[1000:1900], large[1900:]])
    assert client.post(CHAT, content=parts, headers=headers).status_code == 413
    # refused by what it declares, before it is sent
    assert b" 413 " in raw(guarded, head("Content-Length: 99999999999")).split(b"\r\n")[0]
    small = json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()
    halves = [b"%x\r\n%s\r\n" % (len(half), half) for half in (small[:20], small[20:])]
    answered = raw(guarded, head("Transfer-Encoding: chunked"), *halves, b"0\r\n\r\n")
    assert b" 200 " in answered.split(b"\r\n")[0]


def test_bodies_that_do_not_arrive(guarded: Served) -> None:
    """Longer than they are, or a byte at a time."""
    for parts in ([b'{"messages"'], [b"{", b'"', b"m", b"e", b"s"]):
        answer = raw(guarded, head("Content-Length: 100"), *parts, pause=0.05)
        assert b" 408 " in answer.split(b"\r\n")[0]
    longer = raw(guarded, head("Content-Length: 5"), b'{"messages": []}')
    assert b" 400 " in longer.split(b"\r\n")[0]
    negative = raw(guarded, head("Content-Length: -5"), b"{}")
    assert b" 400 " in negative.split(b"\r\n")[0]
    assert guarded.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_sequence(server: Served, stream: bool) -> None:
    service, engine = server.service, server.service.chain.engine
    taken = len(service.scheduler._state.running)
    assert taken == 0
    body = json.dumps({**LONG, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    real, num_steps = service.chain.step, 0

    def slow_step() -> bool:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.05)
        return real()

    service.chain.step = slow_step  # type: ignore[method-assign]
    try:
        with socket.create_connection((host, int(port))) as made:
            made.sendall(head(f"Content-Length: {len(body)}") + body)
            wait_until(lambda: engine.num_running == 1 and num_steps > 3)
        left_at = num_steps
        wait_until(lambda: engine.num_running == 0)
        assert num_steps - left_at <= 3
        assert service.scheduler.is_idle
    finally:
        del service.chain.step


def test_other_origins(guarded: Served) -> None:
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    allowed = guarded.client.options(CHAT, headers=asking)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    refused = guarded.get(CHAT, headers={"Origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"
    other = guarded.get("/health", headers={"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


def test_nothing_of_this_machine_is_told(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise ZeroDivisionError(f"division in {chain.folder}")

    with serving(chain) as served:
        monkeypatch.setattr(type(chain), "encode", fail)
        answer = served.post(CHAT, {"messages": QUESTION}, headers={"X-Request-Id": "my-id"})
        monkeypatch.undo()
        assert answer.status_code == 500
        assert "my-id" in answer.json()["error"]["message"]
        for secret in (str(chain.folder), "division", "Traceback", ".py"):
            assert secret not in answer.text
        assert served.chat(max_tokens=2)
    template = chain.tokenizer.chat_template
    chain.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    try:
        with serving(chain) as served:
            answer = served.post(CHAT, {"messages": QUESTION})
            assert answer.status_code == 400
            assert "no such role" in answer.json()["error"]["message"]
        chain.tokenizer.chat_template = "{{ messages[0]['content'] * messages | length }}"
        with serving(chain) as served:
            answer = served.post(CHAT, {"messages": QUESTION})
            assert answer.status_code == 400
            assert str(chain.folder) not in answer.text
    finally:
        chain.tokenizer.chat_template = template


def test_a_client_that_does_not_read_is_given_up(chain: Chain) -> None:
    asked = ChatRequest(messages=QUESTION, stream=True, max_tokens=2)

    async def test() -> None:
        settings = ServeSettings(model_names=("tiny",), request_seconds=0.3)
        service = Service(chain, settings)
        service.scheduler.start()
        try:
            ticket, reply = await service.ask(asked, "id", "someone")
            first = await ticket.news()
            stream = EventStream(service, asked, ticket, reply, first, {})
            with pytest.raises(ClientGone):
                await stream({}, never, lambda message: never())
        finally:
            await service.scheduler.stop()

    async def never() -> Any:
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_broken_engine_is_told(chain: Chain) -> None:
    with serving(chain) as served:
        assert served.get("/health").status_code == served.get("/ready").status_code == 200
        served.service.scheduler.is_broken = True
        assert served.get("/health").status_code == 500
        assert served.get("/ready").status_code == 503
        answer = served.post(CHAT, {"messages": QUESTION})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert served.metric("requests_refused_total", code="engine_failed") == 1
        served.service.scheduler.drain()
        assert served.get("/version").status_code == 200


def test_large_bodies_share_a_room() -> None:
    buffers = Buffers(1000 * SMALL_BYTES, context_tokens=100)
    buffers.hold("a", 0, SMALL_BYTES)  # a small one is not counted
    buffers.hold("a", SMALL_BYTES, 400 * SMALL_BYTES)
    with pytest.raises(ApiError) as caught:
        buffers.hold("a", 0, 101 * SMALL_BYTES)
    assert (caught.value.status, caught.value.code) == (503, "buffers_full")
    assert caught.value.headers["Retry-After"]
    buffers.hold("b", 0, 500 * SMALL_BYTES)
    with pytest.raises(ApiError):
        buffers.hold("c", 0, 101 * SMALL_BYTES)
    buffers.hold("c", 0, 100 * SMALL_BYTES)
    buffers.free("a", 400 * SMALL_BYTES)
    buffers.hold("a", 0, 400 * SMALL_BYTES)


def test_a_body_of_too_many_values_is_not_read(server: Served) -> None:
    most = server.service.context_tokens + (1 << 16)
    for prompt in ([1] * (most + 2), [[]] * (most + 2), [{}] * (most + 2)):
        answer = server.post("/v1/completions", {"prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "values" in answer.json()["error"]["message"]


def test_large_bodies_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polybasic.deploy.serve.buffers._PAUSE_SECONDS", 0.05)
    buffers, order = Buffers(1 << 30, context_tokens=100), list[str]()
    began = time.monotonic()

    async def read(client: str, body: bytes) -> None:
        await buffers.wait_to_read(client, body)
        order.append(client)

    async def test() -> None:
        large, small = bytes(2 * SMALL_BYTES), bytes(SMALL_BYTES)
        asked = [("a", large)] * 3 + [("b", large), ("c", small)]
        await asyncio.gather(*(read(*each) for each in asked))

    asyncio.run(test())
    assert order == ["c", "a", "b", "a", "a"], "clients take turns"
    assert time.monotonic() - began >= 4 * 0.05
