"""Answers of a model behind an OpenAI-compatible server: vLLM, SGLang, TGI, llama.cpp and others.

The `openai` client sends `GET BASE/models` and `POST BASE/chat/completions` with nothing but
standard fields, waits and retries.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import openai

from polybasic.chain.errors import UserError
from polybasic.train.answers.answerer import Answer, FailedAnswer, Prompt
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

Response = TypeVar("Response")


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

    async def answer(self, prompt: Prompt) -> Answer:
        """Ask for one answer; the client tries again where the server fails for a while.

        Raises:
            FailedAnswer: refused, or not answered in any of the tries.
            UserError: what every request would meet: no access, or no such model.
        """
        messages: Any = list(prompt.messages)
        asked = self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=prompt.max_new_tokens,
            temperature=prompt.temperature,
            seed=prompt.seed if prompt.temperature else openai.omit,
        )
        choice = (await _response(self._client, asked)).choices[0]
        reason: str = choice.finish_reason  # servers know more than OpenAI's own
        if reason != _CUT and reason not in _WHOLE:
            raise FailedAnswer(f"an answer that is no text (finish_reason {reason})")
        # None where all that was written is a call or a thought
        return Answer(choice.message.content or "", is_cut=reason == _CUT)


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
        UserError: an unusable URL or key, a server that does not answer, or several models
            without a choice.
    """
    url, key = _base_url(settings), _key()
    seconds, num_parallel = settings.timeout_seconds, settings.num_parallel
    client = openai.AsyncOpenAI(
        base_url=url,
        api_key=key or _NO_KEY,
        max_retries=settings.num_retries,
        http_client=openai.DefaultAsyncHttpxClient(
            timeout=openai.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds)),
            limits=httpx2.Limits(
                max_connections=num_parallel, max_keepalive_connections=num_parallel
            ),
            event_hooks={"response": [_check_content]},
        ),
    )
    async with client:
        try:
            page = await _response(client, client.models.list())
        except FailedAnswer as error:
            raise UserError(
                "endpoint does not answer",
                f"data.regenerate.endpoint = {url} ({error})",
                "start the server and run again",
            ) from error
        served = {each.id: getattr(each, "max_model_len", None) for each in page.data}
        model = settings.model if settings.model is not None else _only(served, url)
        yield Endpoint(client, model, served.get(model) or context_tokens, num_parallel)


class _UnusableContent(httpx2.RequestError):
    """A response without what was asked for; the client tries again, as after a lost connection."""


async def _check_content(response: httpx2.Response) -> None:
    if response.status_code != 200:
        return
    await response.aread()
    try:
        content = response.json()
        if response.url.path.endswith("/models"):
            _ = [each["id"].strip() for each in content["data"]]
            return
        choice = content["choices"][0]
        (choice["message"]["content"] or "").encode("utf-8")
        reason = choice["finish_reason"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _UnusableContent("an answer in another format than OpenAI's") from error
    if reason in _INTERRUPTED:
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


def _base_url(settings: RegenerateSettings) -> str:
    given = settings.endpoint
    assert given is not None, "opened without data.regenerate.endpoint"
    try:
        url = httpx2.URL(given)
        is_usable = url.scheme in ("http", "https") and bool(url.host) and not url.query
    except httpx2.InvalidURL:
        is_usable = False
    if not is_usable:
        raise UserError(
            "not the URL of a server",
            f"data.regenerate.endpoint = {given}",
            "give one like http://localhost:8000/v1",
        )
    if url.userinfo:
        raise UserError(
            "password in a URL",
            f"data.regenerate.endpoint names {url.host} with a user",
            f"set {KEY_NAME}: recipes are written into what you publish",
        )
    return str(url).rstrip("/")


def _key() -> str | None:
    key = os.environ.get(KEY_NAME, "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            "unusable key", f"{KEY_NAME} holds what no HTTP header can", "set it to the key alone"
        )
    return key
