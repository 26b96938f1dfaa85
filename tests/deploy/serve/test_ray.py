"""Replicas behind one address: streams, conversations that stay in place, a lost replica."""

import asyncio
import json
import re
import shutil
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click import UsageError
from fastapi.testclient import TestClient

from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy import load_chain
from tests.conftest import package_around, write_draft, write_target

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra ray is not installed")
replicas = pytest.importorskip("polybasic.deploy.serve.ray")

SEQUENCES, ONGOING = 4, 5
LONG, SHORT = 2400, 150
SETTINGS: dict[str, Any] = {"temperature": 1, "ignore_eos": True}


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def digest(**request: Any) -> str | None:
    return replicas.beginning(json.dumps(request).encode())


def test_all_turns_of_a_conversation_have_one_digest() -> None:
    first = [message("be brief", "system"), message("hello")]
    second = [*first, message("hi", "assistant"), message("how are you?")]
    assert digest(messages=first) == digest(messages=second, temperature=0)
    assert digest(messages=first) != digest(messages=[first[0], message("good morning")])
    assert digest(prompt="x" * 64) == digest(prompt="x" * 64 + "and more")
    assert digest(prompt=list(range(64))) == digest(prompt=list(range(70)))
    assert digest(prompt="one") != digest(prompt="two")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{}", b"\xff", b"[" * 100_000, b'{"messages": 3}'])
def test_what_is_no_conversation_has_none(body: bytes) -> None:
    assert replicas.beginning(body) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "no chain"),
        ({"chain": "nowhere/at/all"}, "nowhere/at/all"),
        ({"chain": ".", "replicas": "0"}, "replicas='0'"),
        ({"chain": ".", "sequences": "many"}, "sequences='many'"),
        ({"chain": ".", "replica": "2"}, "known are"),
    ],
)
def test_a_bad_argument_is_one_line(args: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        replicas.app(args)
    assert said in refused.value.message
    assert "\n" not in refused.value.message


class Scripted:
    """A handle whose replica sends some messages, and then fails or waits."""

    def __init__(self, sent: list[dict[str, Any]], end: Exception | None) -> None:
        self.sent, self.end, self.is_cancelled = sent, end, False

    def options(self, **_: Any) -> "Scripted":
        return self

    def remote(self, *_: Any) -> "Scripted":
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    def __aiter__(self) -> "Scripted":
        return self

    async def __anext__(self) -> list[dict[str, Any]]:
        if self.sent:
            return [self.sent.pop(0)]
        if self.end is None:
            await asyncio.sleep(60)
        raise self.end or StopAsyncIteration


def through_ingress(handle: Scripted) -> Any:
    settings = replicas.ReplicaSettings(chain=".", model_names=("tiny",), request_seconds=0.1)
    ingress = replicas.Ingress(handle, settings)
    with TestClient(ingress.__serve_build_asgi_app__()) as client:
        return client.post("/v1/completions", json={"prompt": "w1"})


LOST = ray.exceptions.ActorDiedError()


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (LOST, 502, "replica_lost"),
        (ray.serve.exceptions.BackPressureError(3, 3), 503, "queue_full"),
        (None, 504, "request_timeout"),
        (ValueError("a secret"), 500, "internal_error"),
    ],
)
def test_what_ends_before_it_began_is_an_error(
    end: Exception | None, status: int, code: str
) -> None:
    handle = Scripted([], end)
    response = through_ingress(handle)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (502, 503))
    assert handle.is_cancelled == (status == 504)
    assert "secret" not in response.text


def test_a_stream_that_is_lost_ends_with_an_error() -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    piece = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    response = through_ingress(Scripted([start, piece], LOST))
    first, last = response.text.strip().split("\n\n")
    assert first == "data: {}"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"


@pytest.fixture(scope="module")
def long_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a context long enough for answers that take a while."""
    models = tmp_path_factory.mktemp("models")
    write_target(models / "target", max_position_embeddings=4096)
    write_draft(models / "head", models / "target")
    parts = [Part("head", "drafter", "eagle2", models / "head")]
    plan = Plan(members=("target", "head"), tree=Tree(depth=2, top_k=2, rows=4))
    package_around(models / "chain", models / "target", parts, plan, copy_target=True)
    return models / "chain"


@pytest.fixture(scope="module")
def cluster(long_chain: Path) -> Iterator[httpx2.Client]:
    """A client of two replicas on a cluster of this machine's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # sockets lie in it, whose paths have to be short
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    on_sigterm = signal.getsignal(signal.SIGTERM)  # which Ray sets in its driver and leaves so
    with pytest.MonkeyPatch.context() as patch:
        # the token would be kept in the home folder
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"chain": str(long_chain), "replicas": "2", "sequences": SEQUENCES, "queue": "100"}
        serve.run(replicas.app({**args, "model_names": "tiny", "api_keys": "key"}))
        address, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer key"}
        with httpx2.Client(
            base_url=address, headers=headers, timeout=120, trust_env=False
        ) as client:
            yield client
        serve.shutdown()
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)
        shutil.rmtree(folder, ignore_errors=True)


def ask(cluster: httpx2.Client, text: str, **settings: Any) -> httpx2.Response:
    messages = settings.pop("messages", [message(text)])
    asked = {"messages": messages, "max_tokens": 8, "seed": 1, **SETTINGS}
    return cluster.post("/v1/chat/completions", json=asked | settings)


def answer(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Of a stream, without the last one, which has to be [DONE] or an error."""
    sent = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    ended = sent[-1] == "[DONE]"
    assert ended or "error" in json.loads(sent[-1]), sent[-1]
    return [json.loads(line) for line in (sent[:-1] if ended else sent)]


def streamed(response: httpx2.Response) -> str:
    """The text of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n"), response.text[-200:]
    choices = [choice for event in events(response) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def by_replica(cluster: httpx2.Client, metric: str) -> dict[str, float]:
    """What each replica counts."""
    found: Counter[str] = Counter()
    line = re.compile(rf'polybasic:{metric}{{.*replica="(\w+)".*}} (\S+)')
    for name, value in line.findall(cluster.get("/metrics").text):
        found[name] += float(value)
    return dict(found)


@pytest.mark.proof
def test_an_answer_is_the_librarys_whole_and_streamed(
    long_chain: Path, cluster: httpx2.Client
) -> None:
    messages = [message("w1 w2")]
    expected = load_chain(long_chain).generate(messages, max_new_tokens=8, **SETTINGS, seed=1).text
    assert answer(ask(cluster, "w1 w2")) == expected
    assert streamed(ask(cluster, "w1 w2", stream=True)) == expected
    assert answer(ask(cluster, "w1 w2", seed=2)) != expected


@pytest.mark.proof
def test_the_pieces_of_a_stream_come_one_by_one(cluster: httpx2.Client) -> None:
    before = sum(by_replica(cluster, "generation_tokens_total").values())
    asked = {"messages": [message("w3")], "max_tokens": LONG, **SETTINGS, "stream": True}
    with cluster.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        assert "assistant" in next(lines)
        assert sum(by_replica(cluster, "num_requests_running").values()) == 1
    # who leaves is noticed
    while sum(by_replica(cluster, "num_requests_running").values()):
        pass
    assert sum(by_replica(cluster, "generation_tokens_total").values()) - before < LONG


@pytest.mark.proof
def test_requests_that_are_wrong_are_told_so(cluster: httpx2.Client) -> None:
    refused = ask(cluster, "w1", model="another")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert cluster.post("/v1/chat/completions", content=b"{").status_code == 400
    assert cluster.get("/nowhere").status_code == 404
    too_large = cluster.post("/v1/completions", content=b" " * ((4 << 20) + 1))
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    other = {"Authorization": "Bearer another"}
    for path, status in (("/v1/models", 401), ("/metrics", 401), ("/health", 200), ("/ready", 200)):
        assert cluster.get(path, headers=other).status_code == status


@pytest.mark.proof
def test_a_conversation_stays_where_its_prefix_is(cluster: httpx2.Client) -> None:
    used = set()
    # conversations are placed at random: of eight alone, all are at one replica once in 128 times
    for number in range(40):
        if number >= 8 and len(used) == 2:
            break
        before = by_replica(cluster, "request_success_total")
        messages = [message(f"w{number} w11 w12 w13 w14 ")]
        for _ in range(3):
            response = ask(cluster, "", messages=messages)
            cached = response.json()["polybasic"]["cached_tokens"]
            assert (cached > 4) == (len(messages) > 1), (number, len(messages), cached)
            messages += [message(answer(response), "assistant"), message(" w20 w21 ")]
        after = by_replica(cluster, "request_success_total")
        [at] = [name for name in after if after[name] != before.get(name, 0)]
        used.add(at)
    assert len(used) == 2


@pytest.mark.proof
def test_a_replica_that_is_killed_loses_what_it_was_answering_and_nothing_else(
    long_chain: Path, cluster: httpx2.Client
) -> None:
    lengths: list[int] = []
    asked: list[Future[httpx2.Response]] = []

    with ThreadPoolExecutor(32) as pool:

        def submit(length: int) -> None:
            n = len(asked)
            settings = {"seed": n, "max_tokens": length, "stream": n % 2 == 0}
            asked.append(pool.submit(ask, cluster, f"w{n}", **settings))
            lengths.append(length)

        running: dict[str, float] = {}
        while min(running.values(), default=0) == 0:
            submit(LONG)
            running = by_replica(cluster, "num_requests_running")
            while sum(running.values()) < sum(not future.done() for future in asked):
                running = by_replica(cluster, "num_requests_running")
        # more than both can take
        for _ in range(2 * ONGOING + 4):
            submit(SHORT)
        by_replica(cluster, "num_requests_running")  # a full replica tells once it is no more
        ray.kill(ray.get_actor(actor_of(max(running, key=lambda name: running[name])), "serve"))
        responses = [future.result() for future in asked]
    loaded, num_lost = load_chain(long_chain), 0
    for n, (length, response) in enumerate(zip(lengths, responses, strict=True)):
        if "replica_lost" in response.text:
            is_whole = response.status_code == 502
            error = response.json() if is_whole else events(response)[-1]
            assert error["error"]["code"] == "replica_lost"
            num_lost += 1
        else:
            text = (answer if n % 2 else streamed)(response)
            settings = {**SETTINGS, "seed": n, "max_new_tokens": length}
            assert text == loaded.generate([message(f"w{n}")], **settings).text
    assert 1 <= num_lost <= ONGOING
    assert answer(ask(cluster, "w1")) == answer(ask(cluster, "w1"))


def actor_of(replica: str) -> str:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    [found] = [name for name in names if replica in name]
    return str(found)
