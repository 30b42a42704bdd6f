"""CALM for T5: decoder layers that all speak, certified early exits. The public names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import OneDecoder
    from .decode_batch import BatchDecoder
    from .drafting import Draft
    from .models.folder import load, save
    from .policies import Budgeted, Confident, Full, Oracle, Replay, Static
    from .records import DecodeTrace, Example
    from .speculative import SpeculativeBatch, SpeculativeOne
    from .thresholds import ThresholdSchedule

_HOME = {
    "BatchDecoder": ".decode_batch",
    "OneDecoder": ".decode",
    "load": ".models.folder",
    "save": ".models.folder",
    "LayerSchedule": ".layer_schedule",
    "Budgeted": ".policies",
    "Confident": ".policies",
    "Draft": ".drafting",
    "Full": ".policies",
    "Oracle": ".policies",
    "Replay": ".policies",
    "SkipSchedule": ".policies",
    "SpeculativeBatch": ".speculative",
    "SpeculativeOne": ".speculative",
    "Static": ".policies",
    "DecodeTrace": ".records",
    "Example": ".records",
    "ThresholdSchedule": ".thresholds",
}

__all__ = [
    "BatchDecoder",
    "Budgeted",
    "Confident",
    "DecodeTrace",
    "Draft",
    "Example",
    "Full",
    "LayerSchedule",
    "OneDecoder",
    "Oracle",
    "Replay",
    "SkipSchedule",
    "SpeculativeBatch",
    "SpeculativeOne",
    "Static",
    "ThresholdSchedule",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'calm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
