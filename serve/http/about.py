"""What the server says of itself: its model, whether it is well, whether it is ready, which version it is."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from calm.serve_config import ServeConfig

from .backend import ServedEngine


class ModelEarlyExit(BaseModel):
    """How deep the served model may be asked to go."""

    num_layers: int = Field(description="Decoder layers, L.")
    exit_layers: list[int] = Field(description="Layers after which a token may be given before the last one.")
    tolerances: dict[str, list[float]] = Field(description="By consistency, those that are certified as it is served.")
    measure: str | None = Field(description="Of the confidence, where none is asked for; null without a calibration.")
    default_tolerance: float | None = Field(description="Of calls that say nothing of early exit; null: full depth.")
    default_consistency: str
    default_draft_layer: int | None = Field(description="Of calls that say nothing; null: one token at a time.")


class ModelCard(BaseModel):
    """The served model."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    ready: bool
    max_prompt_tokens: int | None = Field(description="Null until it was ready for the first time.")
    max_tokens: int | None = Field(description="Longest answer; null until it was ready for the first time.")
    early_exit: ModelEarlyExit | None = Field(description="Null until it was ready for the first time.")


class ModelList(BaseModel):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """A state in a word."""

    status: str


class Version(BaseModel):
    """Which server this is."""

    name: str
    version: str


def model_card(engine: ServedEngine, config: ServeConfig, name: str, created: int) -> dict[str, Any]:
    """``ModelCard``, and further facts that the engine tells of its model."""
    info = engine.info
    early: dict[str, Any] | None = None
    if info is not None:
        early = {
            "num_layers": info.num_layers,
            "exit_layers": list(info.exit_layers),
            "tolerances": {consistency: list(values) for consistency, values in info.tolerances.items()},
            "measure": info.measure,
            "default_tolerance": config.default_tolerance,
            "default_consistency": config.default_consistency.value,
            "default_draft_layer": config.default_draft.layer,
        }
    return {
        **(info.about if info else {}),
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "calm",
        "ready": engine.state == "ready",
        "max_prompt_tokens": info.max_source if info else None,
        "max_tokens": info.max_target if info else None,
        "early_exit": early,
    }


def server_version() -> dict[str, str]:
    """``Version``; unknown where the code runs without being installed."""
    try:
        found = version("calm-t5")
    except PackageNotFoundError:
        found = "unknown"
    return {"name": "calm-t5", "version": found}
