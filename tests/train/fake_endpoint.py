"""A model server on this machine: OpenAI's two addresses, with faults on demand, over HTTP."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Lock, Thread
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One request that goes wrong.

    Attributes:
        status: of the HTTP answer.
        body: of it, in the place of what is right.
        headers: beside the usual ones.
        drops: the connection breaks without an answer.
        hangs: nothing is sent until the client goes away.
        drips: the body never ends, and comes byte by byte.
    """

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drops: bool = False
    hangs: bool = False
    drips: bool = False


@dataclass
class Asked:
    """One request for an answer."""

    body: dict[str, Any]
    authorization: str | None

    @property
    def question(self) -> str:
        """The turn that is to be answered."""
        return self.body["messages"][-1]["content"]


@dataclass
class FakeEndpoint:
    """What is served, and what was asked.

    Attributes:
        models: the entries of the list of models.
        faults: of the next requests for a question's answer, the first comes first.
        always: the fault of every request.
        together: answers wait until so many are under way.
        asked: requests for answers, in order.
        most_at_once: of them under way.
    """

    url: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny"}])
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: Fault | None = None
    together: Barrier | None = None
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    lock: Lock = field(default_factory=Lock)
    num_under_way: int = 0

    def questions(self) -> list[str]:
        """The turns that were asked for, sorted."""
        return sorted(request.question for request in self.asked)


def answer_to(messages: list[dict[str, str]]) -> str:
    """What the model says: it repeats the question and counts its own turns."""
    turn = sum(message["role"] == "assistant" for message in messages)
    return f"turn {turn} about {messages[-1]['content']}"


@contextmanager
def serve() -> Iterator[FakeEndpoint]:
    """Serve one model until the block ends."""
    endpoint = FakeEndpoint()
    handler = type("Handler", (_Handler,), {"endpoint": endpoint})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    endpoint: FakeEndpoint
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._send(404, {"error": {"message": f"no {self.path}"}})
        if self.endpoint.always is not None:
            return self._fail(self.endpoint.always)
        return self._send(200, {"object": "list", "data": self.endpoint.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            return self._send(404, {"error": {"message": f"no {self.path}"}})
        endpoint = self.endpoint
        request = Asked(body, self.headers.get("Authorization"))
        with endpoint.lock:
            endpoint.asked.append(request)
            endpoint.num_under_way += 1
            endpoint.most_at_once = max(endpoint.most_at_once, endpoint.num_under_way)
            faults = endpoint.faults.get(request.question, [])
            fault = endpoint.always or (faults.pop(0) if faults else None)
        if endpoint.together is not None:
            endpoint.together.wait(timeout=30)
        # before the answer, which may be followed by the next request at once
        with endpoint.lock:
            endpoint.num_under_way -= 1
        if fault is not None:
            return self._fail(fault)
        return self._send(200, completion(answer_to(body["messages"]), "stop"))

    def _fail(self, fault: Fault) -> None:
        if fault.hangs:
            self.connection.recv(1)
        if fault.drops or fault.hangs:
            self.close_connection = True
            return
        self._write(fault.status, fault.body or b"{}", fault.headers, fault.drips)

    def _send(self, status: int, content: object) -> None:
        self._write(status, json.dumps(content).encode(), {})

    def _write(
        self, status: int, body: bytes, headers: dict[str, str], drips: bool = False
    ) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            while drips:
                time.sleep(0.05)
                self.wfile.write(b" ")
        except OSError:
            self.close_connection = True  # who asked has gone


def completion(text: str | None, finish_reason: str | None) -> dict[str, Any]:
    """The content of a chat completion."""
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}
