"""The API's own description: every field, every status, and the limits that this server was started with."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from calm.serve_config import ServeConfig

from .asked import CompletionRequest
from .errors import KINDS, RETRY_AFTER_S

Json = dict[str, Any]
ANYWHERE = (400, 408, 413, 431, 500, 503)  # whatever the route: malformed, too large, failed, too many connections
REQUEST = "#/components/schemas/CompletionRequest"
DESCRIPTION = """\
Completions of a certified early-exit T5. The prompt is the encoder's input and the answer is generated from it. Every
token is given by the first decoder layer whose confidence reaches a threshold; a threshold of the certified set keeps
the expected loss of quality below its tolerance. Decoding is greedy unless a temperature is given, and at full depth
unless `early_exit` says otherwise or the server has a default tolerance.

Errors have one form, `{"error": {"message", "type", "param", "code"}}`, and never repeat what was sent. Every answer
carries `x-request-id`.
"""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="One line: what, where, what to do.")
    type: str
    param: str | None = Field(description="The field of the request that is meant.")
    code: str


class ErrorBody(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


def documented(*statuses: int, secured: bool = True) -> dict[int | str, Json]:
    """``responses`` of a route: these errors, and those that any route may answer with."""
    found: dict[int | str, Json] = {}
    for status in sorted({*statuses, *ANYWHERE, *([401] if secured else [])}):
        found[status] = {"model": ErrorBody, "description": KINDS[status].meaning}
        if status in RETRY_AFTER_S:
            seconds = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            found[status]["headers"] = {"Retry-After": seconds}
    return found


def request_body() -> Json:
    """``openapi_extra`` of the route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": REQUEST}}}}}


def describe(app: FastAPI, config: ServeConfig, name: str, secured: bool) -> Json:
    """The OpenAPI document of this server."""
    document = get_openapi(title="calm", version=app.version, description=DESCRIPTION, routes=app.routes)
    schemas = document["components"]["schemas"]
    request = CompletionRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(request.pop("$defs"))
    schemas["CompletionRequest"] = _with_limits(request, config, name)
    for each in ("HTTPValidationError", "ValidationError"):
        schemas.pop(each, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if secured and operation["operationId"] != "healthz":
                operation["security"] = [{"key": []}]
    if secured:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return dict(document)


def _with_limits(schema: Json, config: ServeConfig, name: str) -> Json:
    fields = schema["properties"]
    fields["model"]["enum"] = [name]
    _number(fields["n"])["maximum"] = config.limits.max_n
    texts, ids, lists = fields["prompt"]["anyOf"][1:]
    texts["maxItems"] = lists["maxItems"] = config.limits.max_prompts_per_call
    stops = next(kind for kind in fields["stop"]["anyOf"] if kind.get("type") == "array")
    stops["maxItems"] = config.limits.max_stops
    return schema


def _number(field: Mapping[str, Any]) -> Json:
    """The part of a field's schema that is not null."""
    found: Json = next(kind for kind in field["anyOf"] if kind.get("type") != "null")
    return found
