"""A stand-in for the server: its page, and answers that a test writes."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from polybasic.deploy.serve.app import PAGE_POLICY
from polybasic.deploy.serve.markdown import elements

PAGE = Path(__file__).parents[4] / "deploy" / "serve" / "page"
MEMBERS = ["target", "intermediate", "draft"]
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


class _Handler(BaseHTTPRequestHandler):
    """One request.

    Args:
        server: whose request it is.
    """

    def __init__(self, server: "ScriptedServer", *arguments: Any) -> None:
        self.scripted = server
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = PAGE / ("index.html" if self.path == "/" else self.path.removeprefix("/page/"))
        if self.path == "/v1/models":
            models = [{"id": "tiny", "polybasic": self.scripted.about}]
            self._if_allowed(lambda: self.send_json(200, {"data": models}))
        elif path.is_file():
            self.begin(200, _TYPES[path.suffix], {"Content-Security-Policy": PAGE_POLICY})
            self.wfile.write(path.read_bytes())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/markdown":
            told = {"elements": elements(asked["text"])}
            self._if_allowed(lambda: self.send_json(200, told))
        else:
            self._if_allowed(lambda: self.scripted.answer(Answering(self), asked))

    def _if_allowed(self, act: Callable[[], None]) -> None:
        key = self.scripted.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            act()
        else:
            Answering(self).refuse(401, "no key")

    def send_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.begin(status, "application/json", headers)
        self.wfile.write(json.dumps(body).encode())

    def begin(self, status: int, content_type: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Answering:
    """An answer under way, for a script of a test to give."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def refuse(
        self, status: int, message: str, headers: dict[str, str] | None = None, code: str = ""
    ) -> None:
        """In OpenAI's shape of an error."""
        self._handler.send_json(status, {"error": {"message": message, "code": code}}, headers)

    def begin(self) -> None:
        self._handler.begin(200, "text/event-stream")

    def tokens(
        self,
        *tokens: tuple[str, str],
        text: str | None = None,
        passes: dict[str, int] | None = None,
    ) -> None:
        """A chunk of (text, member); its content is their text, if no other is given."""
        content = "".join(part for part, _ in tokens) if text is None else text
        told = [{"text": part, "id": 1, "member": member} for part, member in tokens]
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
        counted = passes or {"target": 1}
        self.event({"choices": [choice], "polybasic": {"tokens": told, "passes": counted}})

    def end(self, reason: str = "stop", rate: float = 640.0) -> None:
        passes = {"target": 12, "intermediate": 30, "draft": 41}
        self.event(
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": reason}],
                "timings": {"predicted_per_second": rate},
                "polybasic": {"passes": passes, "accepted_length": 4.04, "seed": 7},
            }
        )
        self.raw(b"data: [DONE]\n\n")

    def event(self, content: dict[str, Any]) -> None:
        self.raw(f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode())

    def raw(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def wait_until_left(self) -> None:
        """Until the client closes the connection.

        Raises:
            TimeoutError: it does not within ten seconds.
        """
        self._handler.connection.settimeout(10)
        assert self._handler.connection.recv(1) == b""

    def cut_off(self) -> None:
        """As if the machine were gone."""
        self._handler.connection.shutdown(socket.SHUT_RDWR)


Script = Callable[[Answering], None]


class ScriptedServer:
    """What is served, until a test has it otherwise.

    Attributes:
        scripts: of the answers to come; the last one stays.
        asked: bodies of the requests so far.
        key: that requests need, if there is one.
        about: what its model is said to be.
        url: of the page.
    """

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.asked: list[dict[str, Any]] = []
        self.key: str | None = None
        self.about: dict[str, Any] = {"members": MEMBERS}
        self.url = ""

    def answer(self, answering: Answering, asked: dict[str, Any]) -> None:
        self.asked.append(asked)
        script = self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0)
        script(answering)


@contextmanager
def scripted(*scripts: Script) -> Iterator[ScriptedServer]:
    """The server as long as the block runs."""
    serving = ScriptedServer(*scripts)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, serving)) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        serving.url = f"http://127.0.0.1:{server.server_port}/"
        try:
            yield serving
        finally:
            server.shutdown()
