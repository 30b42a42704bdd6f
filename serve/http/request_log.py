"""Outermost around everything: a request's id, its one log line, and an answer where the code below raised."""

import re
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .disconnects import drop
from .errors import internal_error, send_error
from .logs import log_failure, log_request

_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
GONE = 499  # in logs and metrics only: the client left before it was answered
Finished = Callable[[str | None, int, str | None], None]


class RequestLog:
    """Pure ASGI.

    Args:
        finished: told the route's template, the status and an error's code of every response.
    """

    def __init__(self, app: ASGIApp, finished: Finished) -> None:
        self._app, self._finished = app, finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = request_id(scope)
        facts: dict[str, Any] = {}
        scope.setdefault("state", {})["facts"] = facts
        begun, status, complete = time.perf_counter(), GONE, False

        async def marked(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name.encode())]}
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except Exception as error:
            log_failure(f"request {name} failed", error)
            if status == GONE:
                await send_error(internal_error(), scope, marked)
            elif not complete:
                drop(scope)
        finally:
            if facts.pop("gone", False):
                status = GONE
            route = getattr(scope.get("route"), "path", None)
            self._finished(route, status, facts.get("error"))
            spent = round(1000 * (time.perf_counter() - begun), 3)
            log_request({"id": name, "method": scope["method"], "route": route, "status": status, "ms": spent, **facts})


def request_id(scope: Scope) -> str:
    """The client's own, where it sent one that is short and plain; else a new one."""
    given = [value for key, value in scope["headers"] if key == b"x-request-id"]
    if len(given) == 1 and _ID.fullmatch(given[0]):
        return str(given[0].decode())
    return uuid4().hex
