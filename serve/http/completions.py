"""POST /v1/completions: read, checked, planned, and handed to the engine."""

from typing import Any

from starlette.requests import Request

from calm.errors import CalmError
from calm.serve_config import ServeConfig

from ..messages import ModelInfo
from .answering import Answering
from .answers import Told
from .asked import read_request
from .backend import ServedEngine
from .call import Call
from .errors import ApiError, draining, from_engine
from .media_type import check_media_type
from .metrics import Metrics
from .plan import plan
from .strict_json import strict_json


class Completions:
    """The route.

    Args:
        name: of the model, for clients.
    """

    def __init__(self, engine: ServedEngine, config: ServeConfig, name: str, metrics: Metrics) -> None:
        self._engine, self._config, self._name, self._metrics = engine, config, name, metrics

    async def __call__(self, request: Request) -> Answering:
        """Raises ApiError."""
        check_media_type(request.scope["headers"])
        facts: dict[str, Any] = request.state.facts
        asked = read_request(strict_json(await request.body()))
        if asked.model != self._name:
            raise no_such_model()
        info = ready(self._engine)
        try:
            jobs = plan(asked, info, self._config)
        except CalmError as error:
            raise from_engine(error, "prompt") from None
        stream, timeout_s = bool(asked.stream), self._config.request_timeout_s
        facts.update(model=self._name, stream=stream, prompts=len({job.number for job in jobs}), n=asked.choices)
        if self._config.log_prompts:
            facts["prompt"] = asked.prompt
        call = Call(self._engine, jobs, timeout_s, stream, self._metrics.cancelled)
        head = {"id": f"cmpl-{call.name}", "object": "text_completion", "created": call.created, "model": self._name}
        told = Told(head, info.num_layers, bool(asked.early_exit and asked.early_exit.layers))
        show_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return Answering(call, told, stream, show_usage, timeout_s, facts)


def no_such_model() -> ApiError:
    said = "there is no such model; GET /v1/models names the one that is served"
    return ApiError(404, said, param="model", code="model_not_found")


def ready(engine: ServedEngine) -> ModelInfo:
    """The model of an engine that takes requests. Raises ApiError (503) for one that does not."""
    if engine.state == "draining":
        raise draining()
    if engine.state != "ready" or engine.info is None:
        what = "is loading its model" if engine.state == "loading" else "does not answer and is being replaced"
        raise ApiError(503, f"the engine {what}; try again later")
    return engine.info
