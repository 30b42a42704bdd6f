"""Settings of the experiments that eval.report brings together, a file for each; values in ``conf/<name>.yaml``."""

from typing import Any

from .backfill import BackfillConfig
from .grouping import GroupingConfig
from .length import LengthConfig
from .slowest_row import SlowestRowConfig
from .suitability import SuitabilityConfig

SCHEMAS: dict[str, Any] = {  # by program
    "backfill": BackfillConfig,
    "grouping": GroupingConfig,
    "length": LengthConfig,
    "slowest_row": SlowestRowConfig,
    "suitability": SuitabilityConfig,
}
__all__ = ["SCHEMAS", "BackfillConfig", "GroupingConfig", "LengthConfig", "SlowestRowConfig", "SuitabilityConfig"]
