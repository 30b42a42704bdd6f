"""The API's own description: every field, every status, and the limits that this server was started with."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from calm.serve_config import ServeConfig

from .answers import Chunk
from .asked import CompletionRequest
from .errors import KINDS, RETRY_AFTER_S

Json = dict[str, Any]
ANYWHERE = (400, 408, 413, 431, 500, 503)  # whatever the route: malformed, too large, failed, too many connections
KEY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "browser": {"type": "http", "scheme": "basic", "description": "Any user name, the API key as password."},
}
REF = "#/components/schemas/{model}"
EVENT = {
    "type": "object",
    "properties": {
        "event": {"enum": ["message", "error"]},
        "data": {
            "type": "string",
            "anyOf": [
                {"const": "[DONE]"},
                *(
                    {"contentMediaType": "application/json", "contentSchema": {"$ref": REF.format(model=each)}}
                    for each in ("Chunk", "ErrorBody")
                ),
            ],
        },
    },
    "required": ["data"],
}
DESCRIPTION = """\
Completions of a certified early-exit model. The prompt is an encoder's input, or what a decoder-only model reads before
it answers: a text gets the model's own frame, such as its chat template's, around it. Every token (of a decoder-only
model: every token but the first) is given by the first decoder layer whose confidence reaches a threshold; a threshold
of the certified set keeps the expected loss of quality below its tolerance. Decoding is greedy unless a temperature is
given, and at full depth unless `early_exit` says otherwise or the server has a default tolerance.

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
    schema = {"$ref": REF.format(model=CompletionRequest.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, config: ServeConfig, name: str, secured: bool) -> Json:
    """The OpenAPI document of this server."""
    document = get_openapi(title="calm", version=app.version, description=DESCRIPTION, routes=app.routes)
    schemas = document["components"]["schemas"]
    for model in (CompletionRequest, Chunk):
        found = model.model_json_schema(ref_template=REF)
        schemas.update(found.pop("$defs"))
        schemas[model.__name__] = found
    _limit(schemas["CompletionRequest"], config, name)
    for each in ("HTTPValidationError", "ValidationError"):
        schemas.pop(each, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if secured and operation["operationId"] != "healthz":
                operation["security"] = [{name: []} for name in KEY_SCHEMES]
    if secured:
        document["components"]["securitySchemes"] = KEY_SCHEMES
    return dict(document)


def _limit(schema: Json, config: ServeConfig, name: str) -> None:
    """Tell this server's own limits."""
    fields = schema["properties"]
    fields["model"]["enum"] = [name]
    _number(fields["n"])["maximum"] = config.limits.max_n
    texts, ids, lists = fields["prompt"]["anyOf"][1:]
    texts["maxItems"] = lists["maxItems"] = config.limits.max_prompts_per_call
    stops = next(kind for kind in fields["stop"]["anyOf"] if kind.get("type") == "array")
    stops["maxItems"] = config.limits.max_stops


def _number(field: Mapping[str, Any]) -> Json:
    """The part of a field's schema that is not null."""
    found: Json = next(kind for kind in field["anyOf"] if kind.get("type") != "null")
    return found
