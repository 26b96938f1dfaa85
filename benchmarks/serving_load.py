"""Servers as processes, and clients that keep one request in flight each.

While clients are measured, what a server sends is only stored with its time, and read afterwards:
the clients run on the server's cores.
"""

import bisect
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.request import urlopen

from polybasic.chain.base.errors import UserError

START_SECONDS = 120.0
SILENT_SECONDS = 300.0
Body = Mapping[str, Any]


class RefusedRequest(Exception):
    """An answer that is none: its status and its beginning."""


@dataclass(frozen=True)
class Received:
    """An answer as it came.

    Attributes:
        body: of the request.
        sent, first, ended: seconds of `time.perf_counter`; `first` is that of the first text.
        num_tokens: by the server's usage.
        text: all of it.
        last: the last event, or the whole answer where it was not streamed.
    """

    body: Body
    sent: float
    first: float
    ended: float
    num_tokens: int
    text: str
    last: dict[str, Any]

    def tokens_until(self, end: float) -> float:
        """How many had come by then, if they came evenly from the first to the last."""
        if end <= self.first:
            return 0.0
        return self.num_tokens * min(1.0, (end - self.first) / (self.ended - self.first or 1.0))


@dataclass(frozen=True)
class ServerProcess:
    """A process that listens.

    Attributes:
        url: without a path.
    """

    name: str
    url: str
    process: "subprocess.Popen[bytes]"

    def resident_bytes(self) -> int:
        """Of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server(
    name: str, command: Sequence[object], ready: str, environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    """A server that answers, ended with the block.

    Args:
        command: without `--host` and `--port`, which are added.
        ready: path that answers with 200 once the server does.

    Raises:
        UserError: it ends, or is not ready in time; what it said stands above.
    """
    port = _free_port()
    words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, stdout=said, stderr=said, env={**os.environ, **environment}
        )
        try:
            service = ServerProcess(name, f"http://127.0.0.1:{port}", process)
            if not _is_ready(service.url + ready, process):
                said.seek(0)
                print(said.read().decode(errors="replace")[-4000:])
                raise UserError("server does not start", name, "see its message above")
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urlopen(url, timeout=5):
                return True
        except OSError:  # nobody listens yet, or the answer is that it is not ready
            time.sleep(0.1)
    return False


@dataclass(frozen=True)
class Load:
    """What clients received.

    Attributes:
        begin, end: of the time that is measured, by `time.perf_counter`.
        received: all answers, also of what was asked before it and what came after it.
        refused: requests without an answer, and what came instead.
    """

    begin: float
    end: float
    received: list[Received]
    refused: list[tuple[Body, str]]

    @property
    def tokens_per_second(self) -> float:
        """Within the measured time."""
        tokens = sum(
            answer.tokens_until(self.end) - answer.tokens_until(self.begin)
            for answer in self.received
        )
        return tokens / (self.end - self.begin)

    @property
    def first_seconds(self) -> list[float]:
        """From request to first text, of those that were asked in the measured time, sorted."""
        asked = (answer for answer in self.received if self.begin <= answer.sent < self.end)
        return sorted(answer.first - answer.sent for answer in asked)


def load_of(
    url: str,
    bodies: Iterator[Body],
    clients: int,
    seconds: float | None = None,
    warm_up: float = 0.0,
    least: int = 0,
) -> Load:
    """Let clients ask, each the next request when it has its answer, on a new connection.

    Args:
        url: of a completion.
        bodies: of the requests; where they end, so does the load.
        seconds: that are measured, None for all; afterwards no request is begun, and those in
            flight are answered.
        warm_up: seconds before the measured ones.
        least: answers to requests of the measured time, which lasts until there are so many.
    """
    raw: list[tuple[Body, float, list[tuple[float, bytes]]]] = []
    refused: list[tuple[Body, str]] = []
    begin, taking = time.perf_counter() + warm_up, Lock()
    until = math.inf if seconds is None else begin + seconds
    ends: list[float] = []

    def next_body() -> Body | None:
        with taking:
            now = time.perf_counter()
            if now < until or sum(sent >= begin for _, sent, _ in raw) < least:
                return next(bodies, None)
            ends.append(now)
            return None

    def ask_until_the_end() -> None:
        while (body := next_body()) is not None:
            sent = time.perf_counter()
            try:
                raw.append((body, sent, _asked(url, body)))
            except OSError as error:
                refused.append((body, f"{type(error).__name__}: {error}"))

    with ThreadPoolExecutor(clients) as pool:
        for asking in [pool.submit(ask_until_the_end) for _ in range(clients)]:
            asking.result()
    end = max(until, ends[0]) if least and ends else min(until, time.perf_counter())
    received = []
    for body, sent, parts in raw:
        try:
            received.append(read_answer(body, sent, parts))
        except RefusedRequest as error:
            refused.append((body, str(error)))
    return Load(begin, end, received, refused)


def _asked(url: str, body: Body) -> list[tuple[float, bytes]]:
    """A response as it came, head and all; the connection is its own."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    content = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((name, int(port)), SILENT_SECONDS) as connection:
        connection.sendall(head.encode() + content)
        parts = []
        while data := connection.recv(1 << 16):
            parts.append((time.perf_counter(), data))
    return parts


def read_response(parts: Sequence[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """Status and body of a response, its parts with the times at which they were whole.

    Raises:
        RefusedRequest: it breaks off.
    """
    whole = b"".join(data for _, data in parts)
    ends = list(itertools.accumulate(len(data) for _, data in parts))
    head, _, _ = whole.partition(b"\r\n\r\n")
    place = len(head) + 4
    if place > len(whole):
        raise RefusedRequest("a response that breaks off")

    def part(start: int, end: int) -> tuple[float, bytes]:
        if end > len(whole):
            raise RefusedRequest("a response that breaks off")
        return parts[bisect.bisect_left(ends, end)][0], whole[start:end]

    status, found = int(head.split(b" ", 2)[1]), []
    if b"transfer-encoding: chunked" not in head.lower():
        for end in ends:
            if end > place:
                found.append(part(place, end))
                place = end
        return status, found
    while True:
        line_end = whole.find(b"\r\n", place)
        if line_end < 0:
            raise RefusedRequest("a response that breaks off")
        size = int(whole[place:line_end], 16)
        if size == 0:
            return status, found
        found.append(part(line_end + 2, line_end + 2 + size))
        place = line_end + 2 + size + 2


def read_answer(body: Body, sent: float, parts: Sequence[tuple[float, bytes]]) -> Received:
    """An answer from what was read, and when.

    Args:
        parts: the response, head and all.

    Raises:
        RefusedRequest: another status than 200, an error in the middle of a stream, or one without
            its end.
    """
    status, parts = read_response(parts)
    if status != 200:
        raise RefusedRequest(
            f"{status} {b''.join(data for _, data in parts)[:200].decode(errors='replace')}"
        )
    ended = parts[-1][0] if parts else sent
    if not body.get("stream"):
        whole = json.loads(b"".join(data for _, data in parts))
        text = _text_of(whole)
        return Received(body, sent, ended, ended, whole["usage"]["completion_tokens"], text, whole)
    first, texts, last, is_done, usage = None, [], {}, False, None
    for now, data in _events(parts):
        if data == b"[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise RefusedRequest(json.dumps(event["error"]))
        if text := _text_of(event):
            first = now if first is None else first
            texts.append(text)
        usage = event.get("usage") or usage
        last = last | event
    if not is_done or usage is None:
        raise RefusedRequest("a stream without its end")
    first = ended if first is None else first
    return Received(body, sent, first, ended, usage["completion_tokens"], "".join(texts), last)


def _events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of events, each with the time at which it was complete."""
    rest = b""
    for now, data in parts:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                yield now, line.removeprefix(b"data:").strip()


def _text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    message = choices[0].get("delta") or choices[0].get("message") or {}
    return choices[0].get("text") or message.get("content") or ""


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the one that so large a share of them does not exceed.

    Raises:
        UserError: there is none, because no request was begun in the measured time.
    """
    if not values:
        raise UserError("no request in the measured time", "--seconds", "measure longer")
    return values[min(len(values) - 1, int(share * len(values)))]
