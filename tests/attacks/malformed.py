"""Requests that a server must refuse in its own words, or survive, as bytes of a socket."""

import itertools
import json
import random
import re
import select
import socket
from dataclasses import dataclass
from typing import Any

from polybasic.deploy.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "w1 w2", "max_tokens": 2},
    "/tokenize": {"prompt": "w1 w2"},
    "/detokenize": {"tokens": [1, 2]},
    "/markdown": {"text": "*w1*"},
}
FIELDS = sorted(
    {
        name
        for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
        for name in model.model_fields
    }
    | {"response_format", "tools", "unknown"}
)
VALUES = (
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2.5",
    "1e400",
    "-1e400",
    "1e-400",
    "NaN",
    "Infinity",
    "9223372036854775808",
    "1e308",
    '""',
    '"w1"',
    '"\\ud800"',
    '"\\u0000"',
    "[]",
    "[[]]",
    "[null]",
    "[-1]",
    "[1.5]",
    '["w1",1]',
    "{}",
    '{"a":1}',
    '{"1":NaN}',
    '{"-1":1}',
    '{"99":1}',
    '[{"role":"user"}]',
    '[{"role":"user","content":"\\udfff"}]',
    '[{"role":"tool","content":"w1"}]',
    '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]',
    '{"include_usage":"yes"}',
    '{"run":["other"]}',
    '{"run":[]}',
    '{"members":1}',
    "1" * 400,
    "1" * 5000,
    '{"1":' + "1" * 400 + "}",
    f'"{"w1 " * 200}"',
    "[" * 2000 + "]" * 2000,
)
"""Written as JSON, as far as they are any."""
LONG = (
    "[" + "1," * 60_000 + "-1]",
    "[" + "-1," * 60_000 + "1]",
    "[" + "1.5," * 40_000 + "1]",
    "[" + '"w1",' * 30_000 + "1]",
    "[" + '{"role":"user"},' * 10_000 + "1]",
    "[" + '{"role":"user","content":""},' * 5_000 + "1]",
    "[" + "[1]," * 30_000 + "1]",
    "[" + "{}," * 50_000 + "1]",
    "{" + ",".join(f'"{number}":"a"' for number in range(15_000)) + "}",
    '[{"role":"user","content":[' + '{"type":"text","text":""},' * 5_000 + "1]}]",
)
"""With thousands of faults, or one behind thousands of good values."""
OF_MESSAGES = ("role", "content", "name", "reasoning_content", "tool_calls", "unknown")
OF_TEMPLATES = ("enable_thinking", "tokenize", "chat_template", "documents", "messages", "a b")
HEADERS = (
    b"Content-Type: application/json\r\nContent-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Type: application/x-www-form-urlencoded",
    b"Content-Type: multipart/form-data; boundary=a",
    b"Content-Type: " + b"a/" * 4000,
    b"Authorization: Basic d29yZDp3b3Jk",
    b"Authorization: Bearer " + b"a" * 8000,
    b"Authorization: Bearer a\r\nAuthorization: Bearer b",
    b"X-Request-Id: " + b"a" * 4000,
    b"X-Request-Id: a\tb",
    b"Accept: image/png",
    b"Accept-Encoding: identity;q=0",
    b"Range: bytes=0-1",
    b"If-Match: *",
    b"Host: other",
    b"Host: [::1",
    b"Origin: null",
    b"Cookie: " + b"a=b; " * 1000,
    b"TE: trailers\r\nTrailer: Content-Length",
    b"Forwarded: for=127.0.0.1;host=other",
)
TEXTS: tuple[bytes, ...] = (
    b"",
    b" ",
    b"{",
    b"null",
    b"[]",
    b'"w1"',
    b"1",
    b"{}",
    b'{"prompt": "w1"} {"prompt": "w1"}',
    b'{"prompt": "w1", "prompt": 3}',
    b'{"prompt": "w1",}',
    b"{'prompt': 'w1'}",
    b"\xef\xbb\xbf{}",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    '{"prompt": "w1"}'.encode("utf-16"),
    b"\x1f\x8b\x08\x00",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b"\x00" * 1000,
    b"prompt=w1&max_tokens=2",
)
_LINE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = json.dumps(GOOD["/v1/completions"]).encode()
FRAMES: tuple[bytes, ...] = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA\x00B: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
    _LINE + b"Content-Length: -1\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 1e3\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 99999999999999999999999\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 8000000000\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 5\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 100000\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + _BODY,
    _LINE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _LINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    _LINE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + _BODY,
    _LINE + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + _BODY,
    _LINE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    _LINE + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    _LINE + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    _LINE + b"Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
)
PATHS = (
    "/..%2f..%2f..%2fetc/passwd",
    "/../../etc/passwd",
    "/page/..%2f..%2fapp.py",
    "/static/../../../../etc/passwd",
    "/%00",
    "/%ff",
    "//v1/models",
    "/v1/models/../../chain.json",
    "/v1/models/other",
    "/v1/models/%2e%2e%2fchain.json",
    "/v1/engines",
    "/docs/../openapi.json",
    "/metrics?name[]=" + "a" * 2000,
    "/" + "a/" * 500,
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "g\u00e9t")


@dataclass(frozen=True)
class Response:
    """What came back; without a status, the server only closed the connection."""

    status: int | None
    head: bytes
    body: bytes


def posted(path: str, body: bytes, kind: str = "application/json") -> bytes:
    """A POST whose frame is right."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    kind = f"Content-Type: {kind}\r\n"
    return (head + kind).encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def got(method: str, path: str) -> bytes:
    """A request without a body."""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def malformed(num_fields: int) -> list[bytes]:
    """Bodies, frames, paths, methods, random bytes, and so many requests with a wrong field."""
    draw = random.Random(3)
    found = [posted(path, text) for path in POSTS for text in TEXTS]
    found += [posted(path, b"{}", kind) for path in POSTS for kind in ("text/plain", "", "\x7f")]
    found += [got("GET", path) for path in PATHS]
    found += [got(method, path) for method in METHODS for path in ("/", *POSTS, "/health")]
    found += FRAMES
    for number in range(60):
        noise = draw.randbytes(draw.randrange(1, 3000))
        start = _LINE[: draw.randrange(len(_LINE))] if number % 2 else b""
        found.append(start + noise + b"\r\n\r\n" * (number % 3))
        cut = bytearray(posted(draw.choice(POSTS), _BODY))
        for _ in range(draw.randrange(1, 8)):
            cut[draw.randrange(len(cut))] = draw.randrange(256)
        found.append(bytes(cut))
    combined = list(itertools.product(GOOD, FIELDS, VALUES))
    for path, field, value in draw.sample(combined, num_fields):
        fields = {name: json.dumps(example) for name, example in GOOD[path].items()} | {
            field: value
        }
        text = ", ".join(f"{json.dumps(name)}: {encoded}" for name, encoded in fields.items())
        found.append(posted(path, f"{{{text}}}".encode()))
    found += draw.sample(_nested(), min(num_fields, 600))
    draw.shuffle(found)
    return found


def _nested() -> list[bytes]:
    """Faults within messages and settings of templates, long lists, and odd headers."""
    path, found = POSTS[0], []
    for name, value in itertools.product(OF_MESSAGES, VALUES):
        given = {"role": '"user"', "content": '"w1"'} | {name: value}
        message = ", ".join(f'"{each}": {encoded}' for each, encoded in given.items())
        found.append(f'{{"messages": [{{{message}}}], "max_tokens": 2}}')
    good = '"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2'
    for name, value in itertools.product(OF_TEMPLATES, VALUES):
        found.append(f'{{{good}, "chat_template_kwargs": {{"{name}": {value}}}}}')
    for final, opens in itertools.product(VALUES[:12], repeat=2):
        found.append(f'{{{good}, "continue_final_message": {final}, "enable_thinking": {opens}}}')
    bodies = [posted(path, text.encode()) for text in found]
    for where, field in (
        (POSTS[0], "messages"),
        (POSTS[0], "logit_bias"),
        (POSTS[0], "stop"),
        (POSTS[1], "prompt"),
        (POSTS[1], "stop_token_ids"),
        (POSTS[3], "tokens"),
    ):
        fields = {name: json.dumps(example) for name, example in GOOD[where].items()}
        for value in LONG:
            given = fields | {field: value}
            text = ", ".join(f'"{name}": {encoded}' for name, encoded in given.items())
            bodies.append(posted(where, f"{{{text}}}".encode()))
    for header in HEADERS:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        bodies.append(head + header + b"\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
    return bodies


def exchange(address: tuple[str, int], data: bytes, patience: float = 0.1) -> Response:
    """Send bytes and read what comes back; after a silence, say that no more comes.

    Raises:
        TimeoutError: the server then neither answers nor closes the connection.
    """
    received, has_ended = b"", False
    with socket.create_connection(address, 10) as connection:
        try:
            connection.sendall(data)
            while True:
                if not has_ended and not select.select([connection], [], [], patience)[0]:
                    connection.shutdown(socket.SHUT_WR)
                    has_ended = True
                if not (part := connection.recv(1 << 16)):
                    break
                received += part
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before everything was read
    head, _, body = received.partition(b"\r\n\r\n")
    if length := re.search(rb"(?i)content-length: (\d+)", head):
        body = body[: int(length[1])]  # without the response to what stood behind the request
    words = head.split(b" ", 2)
    has_status = words[0].startswith(b"HTTP/") and len(words) > 1
    return Response(int(words[1]) if has_status else None, head, body)
