"""An answer as server-sent events."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.api.protocol import ChatRequest, CompletionRequest
from polybasic.deploy.serve.api.replies import Reply
from polybasic.deploy.serve.guard import ClientGone, unless_gone
from polybasic.deploy.serve.service import Service
from polybasic.deploy.serve.tickets import News, RequestHandle

_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class EventStream(Response):
    """Server-sent events; the request is given up as soon as its client is gone."""

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        asked: ChatRequest | CompletionRequest,
        ticket: RequestHandle,
        reply: Reply,
        first: Sequence[News],
        summary: dict[str, Any],
    ) -> None:
        self._service, self._asked, self._ticket = service, asked, ticket
        self._reply, self._first, self._summary = reply, first, summary
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        limit = asyncio.timeout(self._service.settings.request_seconds)
        try:
            async with limit:
                await unless_gone(receive, self._send_all(send))
        except TimeoutError:
            if not limit.expired():
                raise
            raise ClientGone from None  # it does not read
        finally:
            self._summary.update(summary(self._reply))
            self._service.scheduler.cancel(self._ticket)

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        ended = self._reply.ending
        try:
            news = self._first
            while news:
                events = [_event(chunk) for update in news for chunk in self._reply.chunks(update)]
                if events:
                    await _send_body(send, b"".join(events))
                news = await self._ticket.news()
            if self._asked.stream_options.include_usage:
                ended = _event(self._reply.usage_chunk()) + ended
        except ApiError as error:
            ended = _event(self._reply.failure(error))
        await _send_body(send, ended)
        await _send_body(send, b"", more=False)


def _event(content: dict[str, Any]) -> bytes:
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {_ENCODE(content)}\n\n".encode()


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def summary(reply: Reply) -> dict[str, Any]:
    """For the log."""
    usage = reply.usage()
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
