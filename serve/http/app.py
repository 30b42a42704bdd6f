"""The application: routes, and what stands in front of them.

From outside in: request log, head, host, key, body limit, routes. Nothing of a body is read before the key was seen.
"""

import time
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from calm.serve_config import ServeConfig

from .about import Health, ModelCard, ModelList, Version, model_card, server_version
from .answers import Completion
from .backend import ServedEngine
from .body_limit import BodyLimit
from .completions import Completions, no_such_model, ready
from .errors import ApiError, internal_error, note
from .guards import HeadGuard, HostGuard, KeyGuard
from .metrics import CONTENT_TYPE, Metrics
from .openapi import EVENT, describe, documented, request_body
from .request_log import RequestLog
from .static_page import FILES, page_routes


def create_app(engine: ServedEngine, config: ServeConfig, name: str, key: str | None = None) -> ASGIApp:
    """The server's ASGI application.

    Args:
        name: of the model, for clients.
        key: that clients have to send, as a bearer token or a browser's password; None lets everybody in.
    """
    metrics = Metrics(lambda: engine.load, lambda: engine.info)
    engine.on_batch = metrics.saw
    app: ASGIApp = _routes(engine, config, name, metrics, secured=key is not None)
    app = BodyLimit(app, config.max_body_bytes, config.body_timeout_s)
    app = KeyGuard(app, key, pages=FILES)
    app = HostGuard(app, config.host, config.allowed_hosts)
    app = HeadGuard(app)
    return RequestLog(app, metrics.responded)


def _routes(engine: ServedEngine, config: ServeConfig, name: str, metrics: Metrics, secured: bool) -> FastAPI:
    about = server_version()
    app = FastAPI(
        title="calm", version=about["version"], docs_url=None, redoc_url=None, redirect_slashes=False,
        exception_handlers={ApiError: _known, HTTPException: _unrouted, ClientDisconnect: _left, Exception: _unknown},
    )  # fmt: skip
    created = int(time.time())
    complete = Completions(engine, config, name, metrics)

    def card() -> dict[str, Any]:
        return model_card(engine, config, name, created)

    @app.get("/healthz", operation_id="healthz", responses=documented(secured=False), response_model=Health)
    async def healthz() -> Response:
        """Whether the server's process answers; open to everybody."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", operation_id="readyz", responses=documented(), response_model=Health)
    async def readyz() -> Response:
        """Whether the engine takes requests."""
        ready(engine)
        return JSONResponse({"status": "ready"})

    @app.get("/version", operation_id="version", responses=documented(), response_model=Version)
    async def version() -> Response:
        """Which server this is."""
        return JSONResponse(about)

    @app.get("/metrics", operation_id="metrics", responses=_text(), response_class=Response)
    async def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/models", operation_id="list_models", responses=documented(), response_model=ModelList)
    async def list_models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}", operation_id="get_model", responses=documented(404), response_model=ModelCard)
    async def get_model(model: str) -> Response:
        """The model of this name."""
        if model != name:
            raise no_such_model()
        return JSONResponse(card())

    @app.post(
        "/v1/completions", operation_id="create_completion", openapi_extra=request_body(), response_model=None,
        responses={200: _completion(), **documented(404, 415, 429, 504)},
    )  # fmt: skip
    async def create_completion(request: Request) -> Response:
        """Answers to one or several prompts, whole or as server-sent events."""
        return await complete(request)

    app.router.routes.extend(page_routes())
    app.openapi = cache(lambda: describe(app, config, name, secured))  # type: ignore[method-assign]
    return app


def _completion() -> dict[str, Any]:
    said = (
        "The answers. With stream=true as events: chunks until each index has its finish_reason, then the usage where "
        "it is asked for, then [DONE]. An event named error, with an error's body, ends a stream that fails."
    )
    return {"model": Completion, "description": said, "content": {"text/event-stream": {"schema": EVENT}}}


def _text() -> dict[int | str, dict[str, Any]]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {200: {"description": "The metrics.", "content": content}, **documented()}


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note(error, request.scope)
    return Response(error.content, error.status, error.headers, "application/json")


async def _unrouted(request: Request, error: Exception) -> Response:
    """What the framework answers by itself: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        return await _known(request, ApiError(405, "this route has no such method", headers=allowed))
    return await _known(request, ApiError(404, "there is no such route; GET /openapi.json lists them"))


async def _left(request: Request, error: Exception) -> Response:
    """The client left while its body was read; nobody gets this."""
    request.state.facts["gone"] = True
    return Response(status_code=400)


async def _unknown(request: Request, error: Exception) -> Response:
    return await _known(request, internal_error())
