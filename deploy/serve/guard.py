"""What every request passes before it is looked at: its id, its key, the size of its body."""

import asyncio
import hmac
import json
import logging
import re
import time
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polybasic.deploy.serve.api.errors import ApiError, internal_error
from polybasic.deploy.serve.buffers import Buffers
from polybasic.deploy.serve.settings import ServeSettings

_LONG_CONTEXT = 1 << 20
"""Tokens, where the chain is loaded elsewhere."""
OPEN_PATHS = ("/health", "/ready", "/version", "/")
_OPEN_PREFIX = "/page/"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

_log = logging.getLogger("polybasic.serve")


class Guard:
    """The outermost layer of the application.

    It sets `request_id` and `client` in the state of each request, reads its body within the
    limits, logs it, and answers what would else end in a stack trace.
    """

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, context_tokens: int = _LONG_CONTEXT
    ) -> None:
        self.app, self.settings = app, settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._buffers = Buffers(settings.room_bytes, context_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, begin = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "answer": {}}
        status, body = 0, bytearray()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_host(headers)
            scope["state"]["client"] = client = self._client(scope, headers)
            try:
                await self._read(body, client, headers, receive)
                await self._buffers.wait_to_read(client, body)
                await self.app(scope, _replayed(bytes(body), receive), send_named)
            finally:
                self._buffers.free(client, len(body))
        except ApiError as error:
            await _answer(error, scope, receive, send_named)
        except ClientGone:
            status = 499
        except Exception:
            _log.exception("a request failed", extra={"request_id": request_id})
            if status == 0:
                await _answer(internal_error(request_id), scope, receive, send_named)
        finally:
            self._note(scope, status, time.monotonic() - begin)

    def _check_host(self, headers: Headers) -> None:
        """Refuse a page elsewhere whose name was made to mean this machine (DNS rebinding).

        Raises:
            ApiError: the request calls this server by another name than it may.
        """
        allowed = self.settings.allowed_hosts
        try:
            named = urlsplit("//" + headers.get("host", "")).hostname
        except ValueError:
            named = None
        if allowed and named not in allowed:
            raise ApiError(
                403,
                f"this server is not asked by the name {str(named)[:100]!r}: ask {allowed[0]}, or "
                "start it with --allowed-hosts",
                code="host_not_allowed",
            )

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Whose request it is: a key's number, or an address.

        Raises:
            ApiError: a key is needed, and another or none was given.
        """
        address = scope["client"][0] if scope.get("client") else "local"
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return f"address {address}"
        kind, _, given = headers.get("authorization", "").partition(" ")
        # every key is compared, in a time that does not depend on where it differs
        same = [hmac.compare_digest(key, given.strip().encode("latin-1")) for key in self._keys]
        if kind.lower() != "bearer" or not any(same):
            raise ApiError(
                401,
                "this server needs an API key: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key {same.index(True)}"

    async def _read(self, body: bytearray, client: str, headers: Headers, receive: Receive) -> None:
        """Append what arrives of a request's body, within the limits.

        Raises:
            ApiError: it is too large or too slow, or there is no room for it.
        """
        limit = self.settings.body_bytes
        too_large = ApiError(
            413,
            f"the body is larger than {limit:,} bytes, the limit of this server",
            code="body_too_large",
            headers={"Connection": "close"},
        )
        declared = headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    if len(body) + len(part) > limit:
                        raise too_large
                    self._buffers.hold(client, len(body), len(body) + len(part))
                    body += part
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self.settings.body_seconds:g} s",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path, state = scope["path"], scope["state"]
        level = logging.DEBUG if path in ("/health", "/ready", "/metrics") else logging.INFO
        fields: dict[str, Any] = {
            "request_id": state["request_id"],
            "client": state.get("client"),
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
            **state["answer"],
        }
        _log.log(level, "%s %s %d", scope["method"], path, status, extra=fields)


class ClientGone(Exception):
    """The client has closed its connection."""


async def unless_gone(receive: Receive, work: Any) -> Any:
    """What `work` returns.

    Raises:
        ClientGone: the client went away first, and the work was cancelled.
    """
    doing, going = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, going), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        going.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait((doing,))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, and after it what comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(error)(scope, receive, send)


class Json(Response):
    """JSON in ASCII: what a client sent is sent back whatever characters it holds."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: ApiError) -> Json:
    """As a client gets it."""
    return Json(error.body, error.status, headers=error.headers)
