"""Answers of a model behind an OpenAI-compatible server: vLLM, SGLang, TGI, llama.cpp and others.

Asked are `GET BASE/models` and `POST BASE/chat/completions` (OpenAI's API reference, "Chat"), with
nothing but standard fields.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from polybasic.chain.errors import UserError
from polybasic.train.answers.answerer import Answer, FailedAnswer, Prompt
from polybasic.train.settings import RegenerateSettings

KEY_NAME = "OPENAI_API_KEY"
_LONGEST_WAIT_SECONDS = 60.0
_CONNECT_SECONDS = 30.0
_RETRIED = {408, 409, 425, 429}
"""Statuses after which the same request may succeed, beside 5xx: timeouts, conflicts, limits."""
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


class _Transient(Exception):
    """A request that may succeed when it is sent again.

    Args:
        reason: why it did not succeed.
        wait_seconds: that the server asked for.
    """

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class Endpoint:
    """A served model; made by `open_endpoint`.

    Attributes:
        identity: the model as the server names it.
        context_tokens: of a prompt with its answer, with some room for the server's own template.
        num_parallel: requests under way at once.
    """

    def __init__(self, requests: "_Requests", model: str, context_tokens: int) -> None:
        self._requests, self._model = requests, model
        self.identity: dict[str, Any] = {"through": "endpoint", "model": model}
        self.context_tokens = context_tokens - _TEMPLATE_TOKENS
        self.num_parallel = requests.settings.num_parallel

    async def answer(self, prompt: Prompt) -> Answer:
        """Ask for one answer; tried again where the server fails for a while.

        Raises:
            FailedAnswer: refused, or not answered in any of the tries.
            UserError: what every request would meet: no access, or no such model.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(prompt.messages),
            "max_tokens": prompt.max_new_tokens,
            "temperature": prompt.temperature,
        }
        if prompt.temperature:
            body["seed"] = prompt.seed
        return await self._requests.send("POST", "chat/completions", _answer_in, body)


@asynccontextmanager
async def open_endpoint(
    settings: RegenerateSettings, context_tokens: int, first_wait_seconds: float = 1.0
) -> AsyncIterator[Endpoint]:
    """Find out what a server serves, and hold connections to it.

    A key in the environment's `OPENAI_API_KEY` is sent and never shown.

    Args:
        settings: `endpoint` must be set.
        context_tokens: that the target is declared for; a server that tells its own bound
            (`max_model_len` of vLLM and SGLang) is believed.
        first_wait_seconds: before the second try; each further wait is twice as long, at most a
            minute unless the server asks for more.

    Raises:
        UserError: an unusable URL or key, a server that does not answer, or several models
            without a choice.
    """
    url, key = _base_url(settings), _key()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # the time of a request is bounded as a whole, not between its bytes
    timeout = httpx.Timeout(None, connect=min(_CONNECT_SECONDS, settings.timeout_seconds))
    limits = httpx.Limits(
        max_connections=settings.num_parallel, max_keepalive_connections=settings.num_parallel
    )
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as client:
        requests = _Requests(client, url, key, settings, first_wait_seconds)
        try:
            served = await requests.send("GET", "models", _models_in)
        except FailedAnswer as error:
            raise UserError(
                "endpoint does not answer",
                f"data.regenerate.endpoint = {url} ({error})",
                "start the server and run again",
            ) from error
        model = settings.model if settings.model is not None else _only(served, url)
        yield Endpoint(requests, model, served.get(model) or context_tokens)


class _Requests:
    """Requests to one server, each tried several times."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        key: str | None,
        settings: RegenerateSettings,
        first_wait_seconds: float,
    ) -> None:
        self.settings = settings
        self._client, self._url, self._key = client, url, key
        self._first_wait_seconds = first_wait_seconds

    async def send(self, method: str, path: str, read: Any, body: Any = None) -> Any:
        """What `read` makes of the JSON that is answered.

        Raises:
            FailedAnswer: refused, or not answered in any of the tries.
            UserError: a status in `_FUTILE`.
        """
        num_tries, wait = self.settings.num_retries + 1, self._first_wait_seconds
        for num_left in reversed(range(num_tries)):
            try:
                return read(await self._try(method, path, body))
            except _Transient as error:
                if not num_left:
                    tries = "" if num_tries == 1 else f" in each of {num_tries} tries, at the last"
                    raise FailedAnswer(f"{error}{tries}") from error
                if error.wait_seconds > self.settings.timeout_seconds:
                    raise FailedAnswer(
                        f"{error}, to be asked again in {error.wait_seconds:.0f} s"
                    ) from error
                await asyncio.sleep(max(wait, error.wait_seconds))
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        raise AssertionError("the last try returns or raises")

    async def _try(self, method: str, path: str, body: Any) -> Any:
        seconds = self.settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(method, f"{self._url}/{path}", json=body)
        except TimeoutError as error:
            raise _Transient(f"no answer within {seconds:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Transient(f"{type(error).__name__} ({self._shown(str(error))})") from error
        status = response.status_code
        if status == 200:
            try:
                return response.json()
            except ValueError as error:
                raise _Transient("an answer that is not JSON") from error
        reason = f"HTTP {status} ({self._shown(_message_in(response))})"
        if status in _RETRIED or status >= 500:
            raise _Transient(reason, _wait_seconds(response.headers))
        if status in _FUTILE:
            where = f"{method} {self._url}/{path}: {reason}"
            raise UserError("endpoint refuses every request", where, _FUTILE[status])
        raise FailedAnswer(reason)

    def _shown(self, text: str) -> str:
        text = " ".join(text.split())
        if self._key is not None:
            text = text.replace(self._key, "(the key)")
        return text[:_SHOWN_CHARACTERS] or "no reason given"


def _answer_in(content: Any) -> Answer:
    """The answer in the content of a chat completion."""
    try:
        choice = content["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        # None where all that was written is a call or a thought
        text = "" if text is None else text
        text.encode("utf-8")
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError) as error:
        raise _Transient("an answer that is no chat completion") from error
    if reason in _INTERRUPTED:
        raise _Transient(f"an answer that the server broke off (finish_reason {reason})")
    if reason != _CUT and reason not in _WHOLE:
        raise FailedAnswer(f"an answer that is no text (finish_reason {reason})")
    return Answer(text, is_cut=reason == _CUT)


def _models_in(content: Any) -> dict[str, int | None]:
    """Names of the served models with their contexts where the server tells them."""
    try:
        return {str(model["id"]): model.get("max_model_len") for model in content["data"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise _Transient("a list of models that is none") from error


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
        url = httpx.URL(given)
        is_usable = url.scheme in ("http", "https") and bool(url.host) and not url.query
    except httpx.InvalidURL:
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


def _wait_seconds(headers: httpx.Headers) -> float:
    """What Retry-After asks for, in seconds or as a date (RFC 9110, section 10.2.3)."""
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _message_in(response: httpx.Response) -> str:
    """The server's own words about a refusal."""
    try:
        content = response.json()
        error = content.get("error", content)
        message = error if isinstance(error, str) else error.get("message", error)
    except (ValueError, AttributeError):
        return response.text
    return str(message)
