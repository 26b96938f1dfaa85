"""Replicas of a chain behind one address, on one machine or many, through Ray Serve.

    serve run polybasic.deploy.serve.ray:app chain=PATH replicas=2 sequences=16

An ingress takes the requests and hands each to a replica, which answers it by the same application
as `polybasic serve`. The replica is the one that has the conversation's prefix in its caches: Ray
hashes the conversation's beginning onto a ring of the replicas, in which all ingresses agree
without a word between them. One that is full passes to the next on the ring, and one that is gone
is in the ring no longer.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from click import UsageError
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import Field, field_validator
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.logs import log_to_stderr
from polybasic.chain.base.settings import Count, Factor, arguments
from polybasic.chain.formats.chains import resolve_chain
from polybasic.deploy.serve.api.errors import ApiError, out_of_time
from polybasic.deploy.serve.guard import Guard
from polybasic.deploy.serve.metrics import CONTENT_TYPE
from polybasic.deploy.serve.settings import ServeSettings

_Batches = DeploymentResponseGenerator[list[Message]]
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_METHODS = ["GET", "HEAD", "POST", "OPTIONS"]
_PASSED_ON = ("type", "http_version", "method", "path", "raw_path", "query_string", "scheme")
_UNBOUNDED = 100_000
"""Requests in an ingress: those for whom there is no place are told so at once."""
_METRICS_SECONDS = 10
"""A replica that has no place for the question tells once an answer has ended."""
_BEGINNING = 64
"""Characters of a text, or as many of its token ids, by which its continuations are known."""


class ReplicaSettings(ServeSettings):
    """What `serve run` takes as name=value, and a config file of Ray Serve under `args`.

    `api_keys` are also taken from the environment, as POLYBASIC_API_KEY.
    """

    chain: str = Field(description="a chain's folder, the same on every machine, or its hub id")
    model_names: tuple[str, ...] = Field((), description="names, with commas between them")
    replicas: Count = Field(2, description="a number of copies of the chain")
    cpus: Factor = Field(1, description="a number of cores and threads for each replica")
    gpus: float = Field(0, ge=0, le=64, description="a number of GPUs for each replica, or a share")
    dtype: str | None = Field(None, description="auto or a dtype's name")
    context_tokens: Count | None = Field(None, description="a number of tokens")
    target: str | None = Field(None, description="the target's folder or hub id")

    @field_validator("model_names", "api_keys", "allowed_origins", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        return tuple(filter(None, given.split(","))) if isinstance(given, str) else given

    @property
    def ongoing(self) -> int:
        """Requests that a replica takes: a quarter waits there, so that no sequence lies idle."""
        return self.sequences + max(1, self.sequences // 4)


class Replica:
    """A chain in a process of its own, and its application."""

    # Ray awaits it, in the event loop that answers requests
    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]
        from polybasic.deploy import load_chain
        from polybasic.deploy.serve.app import create_app

        log_to_stderr(settings.log_format)
        chain = load_chain(
            settings.chain,
            sequences=settings.sequences,
            dtype=settings.dtype,
            context_tokens=settings.context_tokens,
            target=settings.target,
        )
        self._app = create_app(chain, settings)
        self._running: set[asyncio.Future[None]] = set()
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if self._app.state.service.scheduler.is_broken:
            raise RuntimeError("the engine has failed")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """The application's messages, those that are there already in one list.

        The request is given up when the iterator is closed, as Ray does when the client goes away.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_closed = asyncio.Event()
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await is_closed.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        running = asyncio.ensure_future(run())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            while True:
                made = [await messages.get()]
                while not messages.empty():
                    made.append(messages.get_nowait())
                if batch := [message for message in made if message is not None]:
                    yield batch
                if made[-1] is None:
                    break
            await running
        finally:
            is_closed.set()

    async def metrics(self, scope: Scope) -> tuple[str, int, bytes]:
        """This replica's name, and status and body of its /metrics."""
        status, body = 500, b""
        async for batch in self.answer(scope, b""):
            for message in batch:
                status = message.get("status", status)
                body += message.get("body", b"")
        return serve.get_replica_context().replica_id.unique_id, status, body


class Ingress:
    """Takes requests and hands each to a replica."""

    def __init__(self, replicas: DeploymentHandle, settings: ReplicaSettings) -> None:
        log_to_stderr(settings.log_format)
        self._replicas = replicas
        self._answering = replicas.options(method_name="answer", stream=True)
        # keys are for the replicas to compare: they also know the requests that need none
        self._settings = settings.model_copy(update={"api_keys": ()})

    def __serve_build_asgi_app__(self) -> Starlette:
        routes = [
            Route("/metrics", self._metrics),
            Route("/{path:path}", self._forward, methods=_METHODS),
        ]
        app = Starlette(routes=routes)
        app.add_middleware(Guard, settings=self._settings)
        return app

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        answering = self._answering
        if (begun := beginning(body)) is not None:
            answering = answering.options(session_id=begun)
        batches = cast(_Batches, answering.remote(_scope(request), body))
        seconds = self._settings.request_seconds
        try:
            async with asyncio.timeout(seconds):
                first = await anext(batches)
        except TimeoutError:
            batches.cancel()
            raise out_of_time(seconds) from None
        except BackPressureError:
            message = "all replicas are busy and the queue is full; try again in a few seconds"
            raise ApiError(503, message, None, "queue_full", {"Retry-After": "5"}) from None
        except (RayActorError, DeploymentUnavailableError) as error:
            raise _lost() from error
        return _Forwarded(first, batches)

    async def _metrics(self, request: Request) -> Response:
        """Of all replicas, each with its name as label."""
        try:
            pending = self._replicas.broadcast("metrics", _scope(request))
            answers = await pending.results_async(timeout_s=_METRICS_SECONDS)
        except (RayActorError, DeploymentUnavailableError, TimeoutError) as error:
            raise _lost() from error
        for _, status, body in answers:
            if status != 200:
                return Response(body, status, media_type="application/json")
        texts = {name: body.decode() for name, _, body in answers}
        return Response(generate_latest(_Labelled(texts)), media_type=CONTENT_TYPE)


class _Forwarded(Response):
    """A replica's messages as they come, and an event that says so if it ends before them."""

    def __init__(self, first: list[Message], rest: _Batches) -> None:
        super().__init__(status_code=first[0]["status"])
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of them."""
        for message in self._first:
            await send(message)
        try:
            async for batch in self._rest:
                for message in batch:
                    await send(message)
        except RayActorError:
            headers = dict(self._first[0]["headers"])
            if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            event = b"data: " + json.dumps(_lost().body).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event})


class _Labelled(Collector):
    """Metrics of several replicas.

    Args:
        texts: what each of them says, by its name.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> list[Metric]:
        """Each metric once, with the samples of all replicas."""
        merged: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                empty = Metric(family.name, family.documentation, family.type)
                into = merged.setdefault(family.name, empty)
                for sample in family.samples:
                    into.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
        return list(merged.values())


def beginning(body: bytes) -> str | None:
    """A digest of that part of a request which all turns of its conversation share.

    Of messages it is everything up to the user's first one, of a text its first characters. None
    for a body that holds neither; whether it is a request at all is for a replica to say.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    messages, prompt = asked.get("messages"), asked.get("prompt")
    if isinstance(messages, list):
        roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
        begun: Any = messages[: roles.index("user") + 1 if "user" in roles else None]
    elif isinstance(prompt, str | list):
        begun = prompt[:_BEGINNING]
    else:
        return None
    return hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run` and `serve deploy` start.

    Raises:
        UsageError: an argument that is unknown or out of range, or no such chain. Ray's command
            line says it in one line, and ends with exit code 2.
    """
    try:
        settings = _settings(args)
    except UserError as error:
        raise UsageError(str(error)) from error
    replica = serve.deployment(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.ongoing,
        max_queued_requests=max(1, settings.queue),
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": _ROUTER,
                # any number of them: a config file may change it, or let it follow the load
                "request_router_kwargs": {"num_fallback_replicas": _UNBOUNDED},
            }
        ),
    )(Replica)
    ingress = serve.deployment(max_ongoing_requests=_UNBOUNDED, ray_actor_options={"num_cpus": 0})(
        serve.ingress()(Ingress)
    )
    return ingress.bind(replica.bind(settings), settings)


def _settings(args: dict[str, Any]) -> ReplicaSettings:
    if unknown := sorted(set(args) - set(ReplicaSettings.model_fields)):
        known = ", ".join(sorted(ReplicaSettings.model_fields))
        raise UserError("unknown argument", unknown[0], f"known are {known}")
    if not args.get("chain"):
        raise UserError("no chain", "the application's arguments", "give chain=PATH")
    given = {"api_keys": os.environ.get("POLYBASIC_API_KEY", ""), **args}
    settings = arguments(ReplicaSettings, given)
    resolve_chain(settings.chain)
    names = settings.model_names or (Path(settings.chain).name,)
    return settings.model_copy(update={"model_names": names})


def _scope(request: Request) -> Scope:
    """What a replica needs to know of a request."""
    scope = request.scope
    headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
    headers.append((b"x-request-id", request.state.request_id.encode()))
    client = tuple(scope["client"]) if scope.get("client") else None
    passed_on = {name: scope[name] for name in _PASSED_ON if name in scope}
    return {**passed_on, "headers": headers, "client": client, "root_path": ""}


def _lost() -> ApiError:
    message = "the replica that was to answer is gone or not ready; send the request again"
    return ApiError(502, message, code="replica_lost", headers={"Retry-After": "1"})
