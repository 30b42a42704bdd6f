"""Settings of the experiments that eval.report brings together, a file for each; values in ``conf/<name>.yaml``."""

from typing import Any

from .backfill import BackfillConfig
from .batching import BatchingConfig
from .breakdown import BreakdownConfig
from .length import LengthConfig
from .slowest_row import SlowestRowConfig
from .suitability import SuitabilityConfig

SCHEMAS: dict[str, Any] = {  # by program
    "backfill": BackfillConfig,
    "batching": BatchingConfig,
    "breakdown": BreakdownConfig,
    "length": LengthConfig,
    "slowest_row": SlowestRowConfig,
    "suitability": SuitabilityConfig,
}
__all__ = [
    "SCHEMAS",
    "BackfillConfig",
    "BatchingConfig",
    "BreakdownConfig",
    "LengthConfig",
    "SlowestRowConfig",
    "SuitabilityConfig",
]
