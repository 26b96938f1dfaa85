"""Answers of a model behind an OpenAI-compatible server: vLLM, SGLang, TGI, llama.cpp and others.

The `openai` client sends `GET BASE/models` and `POST BASE/chat/completions` with nothing but
standard fields, waits and retries.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import openai
from pydantic import BaseModel, Field, ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.train.answers.answerer import AskedPrompt, FailedAnswer, WrittenTurn
from polybasic.train.settings import RegenerateSettings

KEY_NAME = "OPENAI_API_KEY"
_NO_KEY = "no-key"  # the client insists on sending one
_CONNECT_SECONDS = 30.0
_FUTILE = {
    401: "set OPENAI_API_KEY to a key of that server",
    403: "set OPENAI_API_KEY to a key that may use this model",
    404: "give the base URL of an OpenAI-compatible server up to /v1, and a model that it serves",
}
"""Statuses that every request would get, and what to do about them."""
_WHOLE = {"stop", "eos_token", "stop_sequence"}
_CUT = "length"
_INTERRUPTED = {"abort", "error", None}
"""Reasons for an end that say that the server gave up, not the model."""
_TEMPLATE_TOKENS = 16
"""By which a server's own reading of a prompt may be longer than ours."""
_SHOWN_CHARACTERS = 200
_BODY_BYTES = 16 << 20
"""Of a response: a hundred times the longest answer, and little beside a machine's memory."""

Response = TypeVar("Response")


class _Message(BaseModel):
    content: str | None = None  # where all that was written is a call or a thought


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = Field(max_length=100)  # servers know more than OpenAI's own


class _Completion(BaseModel):
    """What is read of an answer; pydantic bounds its nesting and numbers."""

    choices: list[_Choice] = Field(min_length=1)


class _Model(BaseModel):
    id: str = Field(max_length=1000)
    max_model_len: int | None = Field(None, ge=1)


class _Models(BaseModel):
    """What is read of the list of models."""

    data: list[_Model]


class Endpoint:
    """A served model; made by `open_endpoint`.

    Attributes:
        identity: the model as the server names it.
        context_tokens: of a prompt with its answer, with some room for the server's own template.
        num_parallel: requests under way at once.
    """

    def __init__(
        self, client: openai.AsyncOpenAI, model: str, context_tokens: int, num_parallel: int
    ) -> None:
        self._client, self._model = client, model
        self.identity: dict[str, Any] = {"through": "endpoint", "model": model}
        self.context_tokens = context_tokens - _TEMPLATE_TOKENS
        self.num_parallel = num_parallel

    async def answer(self, prompt: AskedPrompt) -> WrittenTurn:
        """Ask for one answer; the client tries again where the server fails for a while.

        Raises:
            FailedAnswer: refused, or not answered in any of the tries.
            UserError: what every request would meet: no access, or no such model.
        """
        messages: Any = list(prompt.messages)
        asked = self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=messages,
            max_tokens=prompt.max_new_tokens,
            temperature=prompt.temperature,
            seed=prompt.seed if prompt.temperature else openai.omit,
        )
        content = (await _response(self._client, asked)).content
        choice = _Completion.model_validate_json(content).choices[0]
        reason = choice.finish_reason
        if reason != _CUT and reason not in _WHOLE:
            raise FailedAnswer(f"an answer that is no text (finish_reason {reason})")
        return WrittenTurn(choice.message.content or "", is_cut=reason == _CUT)


@asynccontextmanager
async def open_endpoint(
    settings: RegenerateSettings, context_tokens: int
) -> AsyncIterator[Endpoint]:
    """Find out what a server serves, and hold connections to it.

    A key in the environment's `OPENAI_API_KEY` is sent and never shown.

    Args:
        settings: `endpoint` must be set.
        context_tokens: that the target is declared for; a server that reports its own bound
            (`max_model_len` of vLLM and SGLang) is believed.

    Raises:
        UserError: an unusable key, a server that does not answer, or several models
            without a choice.
    """
    assert settings.endpoint is not None, "opened without data.regenerate.endpoint"
    url, key = settings.endpoint.rstrip("/"), _key()
    seconds, num_parallel = settings.timeout_seconds, settings.num_parallel
    client = openai.AsyncOpenAI(
        base_url=url,
        api_key=key or _NO_KEY,
        max_retries=settings.num_retries,
        http_client=_Client(
            # a small body that unpacks to a large one is not worth the bytes it saves
            headers={"Accept-Encoding": "identity"},
            timeout=openai.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds)),
            limits=httpx2.Limits(
                max_connections=num_parallel, max_keepalive_connections=num_parallel
            ),
            event_hooks={"response": [_check_content]},
        ),
    )
    async with client:
        try:
            listed = await _response(client, client.models.with_raw_response.list())
        except FailedAnswer as error:
            raise UserError(
                "endpoint does not answer",
                f"data.regenerate.endpoint = {url} ({error})",
                "start the server and run again",
            ) from error
        models = _Models.model_validate_json(listed.content).data
        served = {each.id: each.max_model_len for each in models}
        model = settings.model if settings.model is not None else _only(served, url)
        yield Endpoint(client, model, served.get(model) or context_tokens, num_parallel)


class _UnusableContent(httpx2.RequestError):
    """A response without what was asked for; the client tries again, as after a lost connection."""


class _Client(openai.DefaultAsyncHttpxClient):
    """Gives up what is not whole in time; the timeouts of httpx are those of each read."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            async with asyncio.timeout(self.timeout.read):
                return await super().send(request, **options)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("not whole in time", request=request) from error


class _BoundedStream(httpx2.AsyncByteStream):
    """A body that is given up where it is longer than any answer."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > _BODY_BYTES:
                raise _UnusableContent(f"an answer of more than {_BODY_BYTES:,} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _check_content(response: httpx2.Response) -> None:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _UnusableContent("a compressed answer, which was not asked for")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)
    await response.aread()
    if response.status_code != 200:
        return
    kind = _Models if response.url.path.endswith("/models") else _Completion
    try:
        content = kind.model_validate_json(response.content)
    except ValidationError as error:
        raise _UnusableContent("an answer in another format than OpenAI's") from error
    if isinstance(content, _Completion) and (reason := content.choices[0].finish_reason) in (
        _INTERRUPTED
    ):
        raise _UnusableContent(f"an answer that the server broke off (finish_reason {reason})")


async def _response(client: openai.AsyncOpenAI, request: Awaitable[Response]) -> Response:
    """Wait for a response.

    Raises:
        FailedAnswer: refused, or none in any of the tries.
        UserError: a status in `_FUTILE`.
    """
    try:
        return await request
    except openai.APIError as error:
        sent, reason = error.request, _reason(error, client.api_key)
        if isinstance(error, openai.APIStatusError) and error.status_code in _FUTILE:
            # nothing is chained to what is raised: it may quote the key
            raise UserError(
                "endpoint refuses every request",
                f"{sent.method} {sent.url}: {reason}",
                _FUTILE[error.status_code],
            ) from None
        num_tries = 1 + int(sent.headers["x-stainless-retry-count"])
        tries = "" if num_tries == 1 else f" in each of {num_tries} tries, at the last"
        raise FailedAnswer(reason + tries) from None


def _reason(error: openai.APIError, key: str) -> str:
    """Why a request failed, in the server's own words if it has any; without the key."""
    cause = error.__cause__
    if isinstance(error, openai.APIStatusError):
        message = error.body.get("message") if isinstance(error.body, dict) else error.body
        kind, text = f"HTTP {error.status_code}", str(message or "")
    elif isinstance(error, openai.APITimeoutError):
        kind, text = "no answer in time", type(cause).__name__
    elif isinstance(cause, _UnusableContent):
        return str(cause)
    else:
        kind, text = type(cause).__name__, str(cause)
    text = " ".join(text.split()).replace(key, "(the key)")[:_SHOWN_CHARACTERS]
    return f"{kind} ({text or 'no reason given'})"


def _only(served: Mapping[str, int | None], url: str) -> str:
    if len(served) != 1:
        names = ", ".join(sorted(served)[:5]) or "none"
        raise UserError(
            "which model is the target?",
            f"{url} serves {len(served)} models ({names})",
            "set data.regenerate.model to its name there",
        )
    return next(iter(served))


def _key() -> str | None:
    key = os.environ.get(KEY_NAME, "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            "unusable key", f"{KEY_NAME} holds what no HTTP header can", "set it to the key alone"
        )
    return key
