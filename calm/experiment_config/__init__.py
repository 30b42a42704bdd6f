"""Settings of eval.report and of its experiments, a file for each; values in ``conf/<name>.yaml``."""

from typing import Any

from .backfill import BackfillConfig
from .length import LengthConfig
from .report import ReportConfig
from .slowest_row import SlowestRowConfig
from .suitability import SuitabilityConfig

SCHEMAS: dict[str, Any] = {  # by program
    "backfill": BackfillConfig,
    "length": LengthConfig,
    "report": ReportConfig,
    "slowest_row": SlowestRowConfig,
    "suitability": SuitabilityConfig,
}
__all__ = ["SCHEMAS", "BackfillConfig", "LengthConfig", "ReportConfig", "SlowestRowConfig", "SuitabilityConfig"]
