"""What POST /v1/completions takes: OpenAI's fields, those of early exit, and nothing else.

Fields of OpenAI's that are not offered, and those of vLLM's that its clients send, pass with the value that asks for
nothing, because clients send them unasked; any other value, and any unknown field, is refused by name.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from ..options import MAX_STOP_CHARS, MAX_STOPS
from .errors import ApiError, bad_request

_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
MAX_SEED = 2**63 - 1


class Only:
    """A field that is not offered: nothing but null and the value that asks for nothing passes."""

    def __init__(self, *values: Any) -> None:
        self._values = values
        self._says = json.dumps(values[0] if values else None)

    def check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in self._values):
            return value
        context = {"says": self._says}
        raise PydanticCustomError("not_offered", "it is not offered here; leave it out or send {says}", context)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        values = [*dict.fromkeys(self._values), None] if self._values != ({},) else [{}, None]
        return {"enum": values, "description": f"Not offered here; only {self._says} passes."}


def _prompt(value: Any) -> Any:
    """Kinds only: lengths and ids are checked against the server's limits and the model (plan.py)."""
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise PydanticCustomError("prompt", "it must be a text, a list of token ids, or a list of either, and not empty")


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(
            "stop", "it must be a string or a list of at most {most} strings", {"most": MAX_STOPS}
        )
    if not all(1 <= len(text) <= MAX_STOP_CHARS for text in texts):
        raise PydanticCustomError("stop", "each string has 1 to {most} characters", {"most": MAX_STOP_CHARS})
    return tuple(texts)


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompt = Annotated[
    Any,
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {**_IDS, "items": _IDS}],
            "description": (
                "What is answered: a text, token ids (with all that the model wants around a source, such as the "
                "end-of-sequence id last), or a list of texts or of id lists. Each prompt of a list gets its own "
                "choices: prompt i has index i*n to i*n+n-1."
            ),
        }
    ),
]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stop = Annotated[
    Any,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [{"type": "null"}, _STOP_TEXT, {"type": "array", "items": _STOP_TEXT}],
            "description": "Strings that end the answer and are not part of it.",
        }
    ),
]


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = STRICT
    include_usage: bool | None = Field(None, description="Send one more chunk at the end, with the usage of the call.")
    include_obfuscation: Annotated[Any, Only(False)] = None


class Drafted(BaseModel):
    """Full depth, several tokens at a time: the first layers draft, the others verify; no answer changes."""

    model_config = STRICT
    layer: int = Field(ge=1, le=1024, description="The last layer that drafts.")
    length: int = Field(4, ge=1, le=1024, description="Words drafted at a time, at most.")
    measure: Literal["softmax", "state", "classifier", "max_prob", "entropy"] | None = Field(
        None, description="Drafting stops where this confidence is below the threshold; default: nowhere."
    )
    threshold: float = Field(0.0, ge=0, le=1)


class EarlyExit(BaseModel):
    """How deep tokens go: exactly one of policy, threshold, tolerance and draft; `layers` may also stand alone."""

    model_config = STRICT
    policy: Literal["full", "certified", "static", "skip_schedule"] | None = Field(
        None,
        description=(
            "full: all layers. certified: the server's default tolerance, else the smallest that the model is "
            "certified for. static: the same layer for every token. skip_schedule: the layers of each position that "
            "the model was trained with."
        ),
    )
    layer: int | None = Field(None, ge=1, le=1024, description="Of policy static.")
    threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Exit when the confidence reaches it; 1 turns exits off. Certified or not is told.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The threshold that is certified to lose at most this much. /v1/models lists them.",
    )
    measure: Literal["softmax", "state", "classifier", "max_prob", "entropy", "agreement"] | None = Field(
        None, description="Of the confidence; default: the one that the calibration picked."
    )
    consistency: Literal["risk", "textual"] | None = Field(
        None, description="Which certificate: against the reference (risk, the default) or the full model's text."
    )
    draft: Drafted | None = Field(None, description="Decode at full depth, several tokens at a time.")
    layers: bool | None = Field(None, description="Tell the exit layer of every token.")

    @model_validator(mode="after")
    def _one(self) -> "EarlyExit":
        asked = [name for name in ("policy", "threshold", "tolerance", "draft") if getattr(self, name) is not None]
        if len(asked) > 1 or (not asked and not self.layers):
            raise bad_request("early_exit: give exactly one of policy, threshold, tolerance and draft", "early_exit")
        if (self.layer is None) == (self.policy == "static"):
            said = "early_exit.layer: policy static needs it, and nothing else takes it"
            raise bad_request(said, "early_exit.layer")
        fixed = self.policy in ("full", "static", "skip_schedule") or not asked or self.draft is not None
        for name in ("measure", "consistency"):
            if getattr(self, name) is not None and fixed:
                said = "it decides nothing here; it goes with threshold, tolerance or policy certified"
                raise bad_request(f"early_exit.{name}: {said}", f"early_exit.{name}")
        return self


class CompletionRequest(BaseModel):
    """A call of POST /v1/completions."""

    model_config = STRICT | ConfigDict(title="CompletionRequest")
    model: str = Field(description="The served model's name, as GET /v1/models tells it.")
    prompt: Prompt
    max_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Of each answer; default and most: the model's own maximum."
    )
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="No answer ends before; default 0.")
    temperature: float | None = Field(0.0, ge=0, le=2, description="0, the default here, is greedy decoding.")
    top_p: float | None = Field(1.0, gt=0, le=1, description="Share of probability that sampling draws from.")
    n: int | None = Field(1, ge=1, le=2**31 - 1, description="Choices for each prompt; greedy ones are equal.")
    seed: int | None = Field(
        None,
        ge=-MAX_SEED - 1,
        le=MAX_SEED,
        description="The same seed gives the same choices, whatever else is served.",
    )
    stop: Stop = ()
    stream: bool | None = Field(False, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(False, description="Go on to max_tokens whatever is said; for benchmarks.")
    truncate: bool | None = Field(
        False, description="Cut a prompt that is longer than the model takes; otherwise it is refused."
    )
    early_exit: EarlyExit | None = None
    user: str | None = Field(None, description="Ignored.")
    best_of: int | None = Field(None, ge=1, le=2**31 - 1, description="Not offered here; only n's own value passes.")
    echo: Annotated[Any, Only(False)] = None
    frequency_penalty: Annotated[Any, Only(0, 0.0)] = None
    presence_penalty: Annotated[Any, Only(0, 0.0)] = None
    logit_bias: Annotated[Any, Only({})] = None
    logprobs: Annotated[Any, Only()] = None
    suffix: Annotated[Any, Only()] = None
    repetition_penalty: Annotated[Any, Only(1, 1.0)] = None
    top_k: Annotated[Any, Only(-1, 0)] = None
    min_p: Annotated[Any, Only(0, 0.0)] = None

    @model_validator(mode="after")
    def _together(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            said = "best_of: it is not offered here; leave it out or send n's own value"
            raise bad_request(said, "best_of", "not_offered")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: it goes with stream=true only", "stream_options")
        return self

    @property
    def choices(self) -> int:
        """n."""
        return self.n or 1

    @property
    def greedy(self) -> bool:
        return not self.temperature


def read_request(value: Any) -> CompletionRequest:
    """The request that decoded JSON spells. Raises ApiError (400) naming the first field that is wrong."""
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return CompletionRequest.model_validate(value)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False, include_input=False)) from None


def _refused(errors: list[ErrorDetails]) -> ApiError:
    first = errors[0]
    param = _name(first["loc"])
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    message = first["msg"].replace("Input should be", "it must be", 1)
    if first["type"] == "missing":
        message = "it is missing"
    elif first["type"] == "extra_forbidden":
        return bad_request(f"there is no field {param}{more}", param, "unknown_field")
    code = "not_offered" if first["type"] == "not_offered" else None
    return bad_request(f"{param}: {message}{more}", param, code)


def _name(where: tuple[int | str, ...]) -> str:
    """``early_exit.layer``; a key that only the client can have thought of is shown where it looks like a name."""
    parts = [str(part) if _PRINTABLE.fullmatch(str(part)) else "(of an odd name)" for part in where]
    return ".".join(parts)
