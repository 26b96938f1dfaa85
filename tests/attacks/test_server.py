"""The server under requests that no client should send: it stays healthy and tells nothing."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from polybasic.chain.base import errors
from polybasic.deploy import load_chain
from tests.attacks.malformed import GOOD, Response, exchange, got, malformed, posted
from tests.conftest import ChainParts
from tests.deploy.serve.serving import Served, serving

CONTEXT = 32
SEEDED = {"prompt": "w1 w2 w3", "max_tokens": 20, "temperature": 1.0, "seed": 5}
LONG = {**SEEDED, "stream": True, "ignore_eos": True, "max_tokens": CONTEXT - 3}
INSIDE = ["Traceback", 'File "', "site-packages", sys.prefix]
"""What tells of the inside of a server, beside its folders."""
GROWTH = 1.02
SCHEMA_EXAMPLES = 60
"""Of each operation, right and wrong ones."""


@pytest.fixture(scope="module")
def chain_folder(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    models, folder = _tiny_models, tmp_path_factory.mktemp("served") / "chain"
    names = ("target", "intermediate", "draft")
    ChainParts(*(models / name for name in names)).package(folder)
    return folder


@pytest.fixture(scope="module")
def served(chain_folder: Path) -> Iterator[Served]:
    chain = load_chain(chain_folder, dtype="float32", context_tokens=CONTEXT, sequences=4)
    with serving(chain, body_bytes=200_000, body_seconds=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def address(served: Served) -> tuple[str, int]:
    host, _, port = served.url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.fixture(autouse=True)
def _as_before(served: Served, address: tuple[str, int]) -> Iterator[None]:
    """After each attack a seed means the text that it meant before, and nothing is left running."""
    before = answer(address)
    yield
    scheduler, until = served.service.scheduler, time.monotonic() + 10
    while not scheduler.is_idle and time.monotonic() < until:
        time.sleep(0.01)
    assert scheduler.is_idle
    assert exchange(address, got("GET", "/health")).status == 200
    assert exchange(address, got("GET", "/ready")).status == 200
    assert answer(address) == before


def answer(address: tuple[str, int], body: Any = SEEDED) -> Any:
    """Of a seed, as text and token ids."""
    asked = {**body, "return_token_ids": True, "stream": False}
    response = exchange(address, posted("/v1/completions", json.dumps(asked).encode()), 60)
    assert response.status == 200, response
    choice = json.loads(response.body)["choices"][0]
    return choice["text"], choice["token_ids"]


def check(response: Response, folders: list[str]) -> None:
    """Fail where a response is a fault of the server or tells of its inside."""
    told = (response.head + response.body).decode("utf-8", "replace")
    for inside in (*INSIDE, *folders):
        assert inside not in told, told
    if response.status == 503:
        assert b"retry-after" in response.head.lower(), told
    elif response.status is not None:
        assert response.status < 500, told
    if response.status is not None and response.status >= 400 and b"json" in response.head:
        error = json.loads(response.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.fixture(scope="module")
def folders(chain_folder: Path) -> list[str]:
    return [str(chain_folder.parent), str(Path(errors.__file__).parents[1])]


def test_what_counts_as_a_fault() -> None:
    shaped = b'{"error": {"message": "no", "type": "", "param": null, "code": null}}'
    json_head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json"
    for good in (
        Response(None, b"", b""),
        Response(400, json_head, shaped),
        Response(503, b"HTTP/1.1 503\r\nRetry-After: 1", b""),
    ):
        check(good, ["/folder"])
    for bad in (
        Response(500, b"HTTP/1.1 500", b""),
        Response(503, b"HTTP/1.1 503", b""),
        Response(200, b"", b"in /folder/chain.json"),
        Response(400, b"", b'File "x.py", line 3'),
        Response(400, json_head, b'{"detail": "no"}'),
    ):
        with pytest.raises((AssertionError, KeyError)):
            check(bad, ["/folder"])


@pytest.mark.parametrize(
    ("num", "patience"), [(100, 0.03), pytest.param(4000, 0.2, marks=pytest.mark.proof)]
)
def test_malformed_requests_are_refused(
    address: tuple[str, int], folders: list[str], num: int, patience: float
) -> None:
    statuses = set()
    for data in malformed(num):
        try:
            response = exchange(address, data, patience)
            check(response, folders)
        except Exception as error:
            raise AssertionError(f"after {data[:300]!r}") from error
        statuses.add(response.status)
    assert {200, 400} <= statuses, "some are right by chance, and most are not"


@pytest.mark.proof
def test_requests_by_our_own_schema(served: Served, folders: list[str]) -> None:
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(served.app.openapi())
    asked = []
    for found in schema.get_all_operations():
        operation = found.ok()
        is_post = operation.method.upper() == "POST"
        for mode in GenerationMode if is_post else [GenerationMode.POSITIVE]:

            @settings(
                max_examples=SCHEMA_EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(mode))
            def ask(case: Any) -> None:
                response = case.call(base_url=served.url, timeout=20)
                head = "\r\n".join(f"{name}: {value}" for name, value in response.headers.items())
                body = response.content or b""
                check(Response(response.status_code, head.encode(), body), folders)
                asked.append(response.status_code)

            ask()
    told = GOOD.keys() & served.app.openapi()["paths"]
    assert len(told) >= 4
    assert len(asked) >= 2 * len(told) * SCHEMA_EXAMPLES
    assert {200, 400} <= set(asked)


# Connections


def test_slow_bodies_take_nothing_from_others(address: tuple[str, int]) -> None:
    whole = posted("/v1/completions", json.dumps(SEEDED).encode())
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(50)]
        for number, connection in enumerate(slow):
            connection.sendall(whole[: 1 + number * (len(whole) - 2) // 50])
        began = time.monotonic()
        answer(address)
        assert time.monotonic() - began < 1.0
        # whose headers have come are told after a second that their body has not
        last = slow[-1].recv(1 << 16)
        assert b" 408 " in last.splitlines()[0]


def test_heads_have_bounds(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    head = got("GET", "/version")
    assert exchange(address, head).status == 200
    for more in (b"X: " + b"a" * 1_000_000, b"X: a\r\n" * 100_000):
        assert exchange(address, head[:-2] + more).status in (400, None)
    monkeypatch.setattr("polybasic.deploy.serve.server._HEAD_SECONDS", 0.2)
    with socket.create_connection(address, 5) as connection:
        connection.sendall(head[:10])
        began = time.monotonic()
        assert connection.recv(1) == b"", "closed"
        assert 0.1 < time.monotonic() - began < 2


def test_clients_that_go_away_leave_their_place(address: tuple[str, int]) -> None:
    data = posted("/v1/completions", json.dumps(LONG).encode())
    for number in range(40):
        connection = socket.create_connection(address, 5)
        connection.sendall(data)
        if number % 4 == 0:
            connection.shutdown(socket.SHUT_WR)
        if number % 4 == 1:
            connection.recv(1)
        if number % 2 == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    assert len(answer(address)[1]) > 0


def test_requests_behind_each_other_on_one_connection(address: tuple[str, int]) -> None:
    whole = posted("/v1/completions", json.dumps(SEEDED).encode())
    kept = whole.replace(b"Connection: close\r\n", b"")
    text = answer(address)[0]
    with socket.create_connection(address, 10) as connection:
        connection.sendall(kept * 3 + whole)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    bodies = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert [json.loads(body)["choices"][0]["text"] for body in bodies] == [text] * 4


def test_a_body_beyond_the_bound_is_not_read(address: tuple[str, int]) -> None:
    path = "/v1/completions"
    large = json.dumps({**GOOD[path], "user": "x" * 300_000}).encode()
    assert exchange(address, posted(path, large)).status == 413
    chunk = b"%x\r\n%s\r\n" % (len(large), large)
    head = posted(path, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert exchange(address, head + chunk * 50 + b"0\r\n\r\n").status in (413, None)


# Memory


@pytest.mark.proof
def test_requests_leave_no_memory_behind(chain_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polybasic.recipes.cli.main", "serve", str(chain_folder)]
    options = ["--port", "0", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen([*command, *options], stderr=said)
    try:
        address = _listening(process, log)
        bodies = [
            json.dumps({**SEEDED, "max_tokens": 4, "seed": seed, "stream": seed % 2 == 0}).encode()
            for seed in range(50)
        ]
        found = []
        for requests in (200, 1800):
            for number in range(requests):
                body = b"{" if number % 5 == 4 else bodies[number % 50]
                response = exchange(address, posted("/v1/completions", body), 60)
                assert response.status == (400 if body == b"{" else 200), response
            pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
            found.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
        assert found[1] <= GROWTH * found[0], found
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()


def _listening(process: "subprocess.Popen[bytes]", log: Path) -> tuple[str, int]:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if "http://" in line:
                host, _, port = line.split("http://")[1].split(";")[0].partition(":")
                return host, int(port)
        time.sleep(0.1)
    raise AssertionError(log.read_text())
