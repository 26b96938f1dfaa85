"""The application: paths, and what each does."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.serve.api.errors import ApiError, bad_request
from polybasic.deploy.serve.api.infill import InfillRequest, infilled
from polybasic.deploy.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MarkdownRequest,
    TokenizeRequest,
    refusal_of,
)
from polybasic.deploy.serve.api.replies import Reply
from polybasic.deploy.serve.api.responses import ResponsesReply, ResponsesRequest
from polybasic.deploy.serve.api.streams import EventStream, summary
from polybasic.deploy.serve.guard import Guard, Json, error_response, unless_gone
from polybasic.deploy.serve.learning import Learner
from polybasic.deploy.serve.metrics import CONTENT_TYPE
from polybasic.deploy.serve.service import Service
from polybasic.deploy.serve.settings import ServeSettings
from polybasic.deploy.serve.tickets import RequestHandle

_PAGE = Path(__file__).parent / "page"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # no script of the page can turn text into markup
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ERROR = {
    "description": "refused or failed",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
_REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def create_app(chain: Chain, settings: ServeSettings, learner: Learner | None = None) -> FastAPI:
    """The ASGI application over a loaded chain.

    It starts the chain's thread with its lifespan and ends it there; `app.state.service` is what
    the paths call.

    Args:
        chain: as `load_chain` returns it, with at least `settings.sequences` sequences.
        learner: learns from its answers.
    """
    service = Service(chain, settings, learner)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        try:
            yield
        finally:
            await service.scheduler.stop()
            service.reading.close()

    app = FastAPI(
        title="polybasic",
        version=version("polybasic"),
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses=_REFUSALS,
    )
    app.state.service = service
    _add_answers(app, service)
    _add_texts(app, service)
    _add_state(app, service)
    if settings.page:
        _add_page(app, service)

    def refused(error: ApiError) -> Response:
        # answers that fail later are counted by their end
        if error.status < 500 or error.status == 503:
            service.metrics.refused(str(error.code))
        return error_response(error)

    # what is not async would run in a thread
    async def of_api_error(_: Request, error: Any) -> Response:
        return refused(error)

    async def of_validation(_: Request, error: Any) -> Response:
        return refused(_invalid(error))

    async def of_http(_: Request, error: Any) -> Response:
        return refused(_of_http(error))

    app.add_exception_handler(ApiError, of_api_error)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)
    app.add_middleware(Guard, settings=settings, context_tokens=service.context_tokens)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _answer(service, asked, request)

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await _answer(service, asked, request)

    @app.post("/v1/responses")
    async def respond(asked: ResponsesRequest, request: Request) -> Response:
        try:
            chat = ChatRequest.model_validate(asked.chat)
        except ValidationError as error:
            raise refusal_of(error.errors()[0]) from error
        return await _answer(service, chat, request, partial(ResponsesReply, of=asked))

    @app.post("/infill")
    async def infill(asked: InfillRequest, request: Request) -> Json:
        service.check_model(asked.model)
        asking = service.infill(asked, request.state.client)
        reply = await _whole(service, await unless_gone(request.receive, asking), request)
        return Json(infilled(reply))


async def _answer(
    service: Service,
    asked: ChatRequest | CompletionRequest,
    request: Request,
    made: Callable[..., Reply] | None = None,
) -> Response:
    """Whole, or as a stream whose first part is there: until then errors have a status."""
    if not asked.stream:
        return Json((await _whole(service, asked, request, made)).whole())
    asking = service.ask(asked, request.state.request_id, request.state.client, made)
    ticket, reply = await unless_gone(request.receive, asking)
    try:
        first = await unless_gone(request.receive, ticket.news())
    except BaseException:
        service.scheduler.cancel(ticket)
        raise
    return EventStream(service, asked, ticket, reply, first, request.state.answer)


async def _whole(
    service: Service,
    asked: ChatRequest | CompletionRequest,
    request: Request,
    made: Callable[..., Reply] | None = None,
) -> Reply:
    """The reply once all answers have ended."""
    asking = service.ask(asked, request.state.request_id, request.state.client, made)
    ticket, reply = await unless_gone(request.receive, asking)
    try:
        await unless_gone(request.receive, _all(ticket, reply))
    except BaseException:
        service.scheduler.cancel(ticket)
        raise
    request.state.answer.update(summary(reply))
    return reply


async def _all(ticket: RequestHandle, reply: Reply) -> None:
    while news := await ticket.news():
        for update in news:
            reply.choices[update.index].read(update)


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request) -> Json:
        service.check_model(asked.model)
        asking = service.tokenize(asked, request.state.client)
        return Json(await unless_gone(request.receive, asking))

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> Json:
        service.check_model(asked.model)
        asking = service.detokenize(asked.tokens, request.state.client)
        return Json({"prompt": await unless_gone(request.receive, asking)})


def _add_state(app: FastAPI, service: Service) -> None:
    scheduler = service.scheduler

    @app.get("/v1/models")
    async def models() -> Json:
        return Json({"object": "list", "data": service.models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        [found] = [each for each in service.models() if each["id"] == name]
        return Json(found)

    @app.get("/health")
    async def health() -> Json:
        if scheduler.is_broken:
            raise ApiError(500, "the engine has failed", code="engine_failed")
        return Json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Json:
        if not scheduler.is_ready:
            raise ApiError(503, "no requests are taken now", code="not_ready")
        return Json({"status": "ready"})

    @app.get("/version")
    async def version_of() -> Json:
        return Json({"version": version("polybasic")})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


class _Page(StaticFiles):
    """Files of the page, with headers that keep it to this server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


def _add_page(app: FastAPI, service: Service) -> None:
    files = _Page(directory=_PAGE)
    app.mount("/page", files)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    # not below /page, which needs no key
    @app.post("/markdown", include_in_schema=False)
    async def markdown(asked: MarkdownRequest, request: Request) -> Json:
        reading = service.markdown(asked.text, request.state.client)
        return Json({"elements": await unless_gone(request.receive, reading)})


def _invalid(error: Any) -> ApiError:
    # of a union's alternatives, the one that came furthest says most
    return refusal_of(max(error.errors(), key=lambda fault: len(fault["loc"])))


def _of_http(error: Any) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "there is no such path", code="not_found")
    if error.status_code == 400:
        return bad_request("the body cannot be read as JSON", code="invalid_json")
    return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
