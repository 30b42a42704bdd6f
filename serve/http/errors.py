"""Every error that a client can meet: one JSON envelope, fixed kinds, and nothing of what the client sent in it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope, Send

from calm.errors import CalibrationError, ConfigError, DataError

from ..errors import Draining, EngineGone, QueueFull

Json = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What a status means here: OpenAI's ``type``, the usual ``code``, and a sentence for the documentation."""

    type: str
    code: str
    meaning: str


KINDS = {
    400: Kind("invalid_request_error", "invalid_request", "The request is malformed or asks for what cannot be had."),
    401: Kind("authentication_error", "invalid_api_key", "The API key is missing or wrong."),
    404: Kind("not_found_error", "not_found", "There is no such route or model."),
    405: Kind("invalid_request_error", "method_not_allowed", "The route has no such method; Allow lists those it has."),
    408: Kind("timeout_error", "body_timeout", "The request's body did not arrive in time."),
    413: Kind("invalid_request_error", "body_too_large", "The request's body is larger than the server takes."),
    415: Kind("invalid_request_error", "unsupported_media_type", "The body must be plain application/json in UTF-8."),
    429: Kind("rate_limit_error", "queue_full", "Too many requests wait; send it again after Retry-After seconds."),
    431: Kind("invalid_request_error", "headers_too_large", "The request's headers are too many or too large."),
    500: Kind("server_error", "internal_error", "The server failed on this request; others are not affected."),
    503: Kind(
        "unavailable_error", "not_ready", "The engine takes no requests now; try again after Retry-After seconds."
    ),
    504: Kind("timeout_error", "request_timeout", "The answer was not finished within the server's time limit."),
}
RETRY_AFTER_S = {429: 1, 503: 5}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: one of ``KINDS``.
        message: one line for the client: what, where, what to do; it never holds the request's own text.
        param: the field of the request that is meant.
        code: where it is another than the status' usual one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or KINDS[status].code
        self.headers = dict(headers or {})
        if status in RETRY_AFTER_S:
            self.headers.setdefault("retry-after", str(RETRY_AFTER_S[status]))
        if status == 401:
            self.headers.setdefault("www-authenticate", "Bearer")

    @property
    def body(self) -> Json:
        error = {"message": self.message, "type": KINDS[self.status].type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    return ApiError(500, "the server failed on this request; its log says why, under the x-request-id of this answer")


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """The whole response, for those who have no framework around them."""
    note(error, scope)
    headers = {"content-type": "application/json", "content-length": str(len(error.content)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.content})


def note(error: ApiError, scope: Scope) -> None:
    """Leave the error's code for the log line of the request."""
    scope.get("state", {}).get("facts", {})["error"] = error.code


def from_engine(error: Exception, prompt: str) -> ApiError:
    """What a client is told of an error that the engine raised for one of its prompts: ``prompt``, ``prompt[2]``."""
    line = " ".join(str(error).split())
    match error:
        case QueueFull():
            return ApiError(429, "too many requests wait already; send it again later")
        case Draining():
            return draining()
        case EngineGone():
            return ApiError(503, "the engine went away while it had this request; send it again", code="engine_gone")
        case DataError():
            return bad_request(f"{prompt}: {line}", prompt)
        case CalibrationError():
            return bad_request(line, "early_exit", "not_calibrated")
        case ConfigError():
            return bad_request(line)
    return internal_error()


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down and takes nothing new; ask another one", code="draining")
