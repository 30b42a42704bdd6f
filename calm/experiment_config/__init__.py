"""Settings of the experiments that eval.report brings together, a file for each; values in ``conf/<name>.yaml``."""

from typing import Any

from .backfill import BackfillConfig
from .length import LengthConfig
from .slowest_row import SlowestRowConfig
from .suitability import SuitabilityConfig
from .thresholds import ThresholdsConfig

SCHEMAS: dict[str, Any] = {  # by program
    "backfill": BackfillConfig,
    "length": LengthConfig,
    "slowest_row": SlowestRowConfig,
    "suitability": SuitabilityConfig,
    "thresholds": ThresholdsConfig,
}
__all__ = ["SCHEMAS", "BackfillConfig", "LengthConfig", "SlowestRowConfig", "SuitabilityConfig", "ThresholdsConfig"]
