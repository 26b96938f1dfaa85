"""What the server's benchmark makes of what clients receive."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from threading import Thread
from typing import Any

import pytest
from typer.main import get_command

from polybasic.chain.base.errors import UserError
from polybasic.recipes.cli.main import app
from tests.benchmarks.scripts import load_script

load, systems, serving = map(load_script, ("serving_load", "serving_systems", "serving"))

BODY = {"stream": True, "prompt": [1, 2]}
STREAM = "".join(
    f"data: {json.dumps(event)}\n\n"
    for event in (
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "Zwölf"}]},
        {"choices": [{"text": " Uhr"}], "usage": None},
        {"choices": [], "usage": {"completion_tokens": 3}, "polybasic": {"seed": 4}},
    )
).encode()
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunked(data: bytes, size: int) -> bytes:
    """In chunks of so many bytes."""
    parts = [data[place : place + size] for place in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chunk", [None, 1, 30, 1000])
def test_a_stream_is_read_however_it_is_cut(size: int, chunk: int | None) -> None:
    whole = HEAD + STREAM + DONE
    if chunk is not None:
        whole = CHUNKED + chunked(STREAM + DONE, chunk)
    parts = [(place + 1.0, whole[place : place + size]) for place in range(0, len(whole), size)]
    found = load.read_answer(BODY, 0.5, parts)
    assert (found.text, found.num_tokens) == ("Zwölf Uhr", 3)
    assert found.last["polybasic"] == {"seed": 4}
    if chunk is None:
        end_of_text = whole.index(b"\n", whole.index(b"Zw"))
        assert found.first - 1 <= end_of_text < found.first - 1 + size, "the empty text is none"
        assert found.ended == parts[-1][0]
    elif 1 < chunk < len(STREAM) and size == 1:
        assert whole.index(b"Zw") < found.first < found.ended < len(whole)


def test_an_answer_that_is_not_streamed() -> None:
    whole = {"choices": [{"text": "ja"}], "usage": {"completion_tokens": 1}}
    found = load.read_answer({"stream": False}, 0.5, [(2.0, HEAD + json.dumps(whole).encode())])
    assert (found.text, found.num_tokens, found.first, found.ended) == ("ja", 1, 2.0, 2.0)


@pytest.mark.parametrize(
    "data", [STREAM, STREAM[:40], b"", DONE, STREAM + b'data: {"error": {"code": 500}}\n\n' + DONE]
)
def test_a_stream_that_breaks_off_is_no_answer(data: bytes) -> None:
    with pytest.raises(load.RefusedRequest):
        load.read_answer(BODY, 0.0, [(1.0, HEAD + data)])


def test_a_response_that_breaks_off_or_refuses_is_no_answer() -> None:
    whole = CHUNKED + chunked(STREAM + DONE, 30)
    for data in (b"", HEAD[:-3], whole[:-7], whole[:-40], HEAD.replace(b"200", b"503") + b"busy"):
        with pytest.raises(load.RefusedRequest):
            load.read_answer(BODY, 0.0, [(1.0, data)])
    assert load.read_answer(BODY, 0.0, [(1.0, whole)]).text == "Zwölf Uhr"


def test_tokens_count_where_they_came_in_the_measured_time() -> None:
    def received(sent: float, first: float, ended: float) -> Any:
        return load.Received(BODY, sent, first, ended, 10, "", {})

    before, across = received(0.0, 0.5, 1.0), received(0.5, 1.0, 3.0)
    within, late = received(2.0, 2.5, 2.75), received(2.9, 3.0, 4.0)
    found = load.Load(1.0, 3.0, [before, across, within, late, received(2.5, 3.5, 4.0)], [])
    assert found.tokens_per_second == (10 + 10) / 2
    assert found.first_seconds == pytest.approx([0.1, 0.5, 1.0])
    half = load.Load(2.0, 3.0, [before, across], [])
    assert half.tokens_per_second == 5
    assert load.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert load.percentile([1.0, 2.0], 1.0) == 2.0
    with pytest.raises(UserError, match="measure longer"):
        load.percentile([], 0.5)


class Fake(BaseHTTPRequestHandler):
    """Streams to prompts of even numbers, and refuses others."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_even = body["prompt"][0] % 2 == 0
        self.send_response(200 if is_even else 503)
        self.end_headers()
        self.wfile.write(STREAM + DONE if is_even else b"busy")

    def log_message(self, *_: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def address() -> Iterator[str]:
    with FakeServer(("127.0.0.1", 0), Fake) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_request_is_answered_or_refused(address: str) -> None:
    bodies = [{**BODY, "prompt": [number]} for number in range(20)]
    found = load.load_of(address, iter(bodies), 8)
    assert sorted(answer.body["prompt"][0] for answer in found.received) == list(range(0, 20, 2))
    assert sorted(body["prompt"][0] for body, _ in found.refused) == list(range(1, 20, 2))
    assert {why for _, why in found.refused} == {"503 busy"}
    assert {answer.text for answer in found.received} == {"Zwölf Uhr"}


def test_no_request_begins_after_the_time(address: str) -> None:
    def bodies() -> Iterator[Any]:
        while True:
            yield {**BODY, "prompt": [2]}

    found = load.load_of(address, bodies(), 2, seconds=0.2, warm_up=0.1)
    assert found.end - found.begin == pytest.approx(0.2)
    assert len(found.first_seconds) < len(found.received)
    assert max(answer.sent for answer in found.received) < found.end
    assert found.tokens_per_second > 0
    longer = load.load_of(address, bodies(), 2, seconds=0.001, least=50)
    assert 50 <= len(longer.received) <= 52
    assert longer.end - longer.begin > 0.001
    assert 50 <= len(longer.first_seconds) <= 51


def test_a_system_without_its_answers_is_no_figure(address: str) -> None:
    system = systems.ServedSystem("fake", load.ServerProcess("fake", address, None), {})
    assert len(system.load(iter([[2], [4]]), 3, 1).received) == 2
    with pytest.raises(UserError, match="1 of fake; 503 busy"):
        system.load(iter([[2], [3]]), 3, 1)
    with pytest.raises(UserError, match="2 of fake; 3 tokens"):
        system.load(iter([[2], [4]]), 5, 1)


def test_systems_take_turns_and_are_compared_with_the_best_other(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WARM_UP_SECONDS", 0.0)
    server = load.ServerProcess("fake", address, None)
    names = ("polybasic", "polybasic fixed", "llama-server")
    all_systems = [systems.ServedSystem(name, server, {}) for name in names]
    loads = serving.measured_loads(all_systems, [[2], [4]], 3, [2], 0.15, 2)
    assert {len(turns) for of_one in loads.values() for turns in of_one.values()} == {2}
    report = serving.ScriptReport(prints=False)
    serving.report_load(report, loads, {(2,): "Zwölf Uhr", (4,): "another"})
    text = report.text
    assert text.count("| polybasic fixed") == 4
    assert text.count("the other plans") == text.count(", llama-server") == 3
    for line in text.split("Answers:")[1].splitlines():
        if line.startswith("| poly"):
            _, _, every, equal, _ = line.split("|")
            assert 0 < int(equal) < int(every), "half of them is another text"


def test_requests_of_the_queue_differ() -> None:
    bodies = serving.mixed_requests([[number] for number in range(10)], 24)
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert {body["max_tokens"] for body in islice(bodies, 48)} == set(range(1, 25))
    assert {body["stream"] for body in bodies} == {True, False}


def test_the_server_is_started_by_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    @contextmanager
    def server(name: str, command: list[Any], *given: Any) -> Iterator[None]:
        asked.append([str(word) for word in command])
        yield None

    monkeypatch.setattr(systems, "server", server)
    settings = {"chain": "chain", "dtype": "auto", "slots": 4, "context_tokens": 512}
    with systems.our_server(argparse.Namespace(**settings)):
        _, _, _, command, *words = asked[0]
    context = get_command(app).commands[command].make_context(command, words)  # type: ignore[attr-defined]
    assert context.params["no_history"]
