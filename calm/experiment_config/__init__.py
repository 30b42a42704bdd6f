"""Settings of the experiments that eval.report brings together, a file for each; values in ``conf/<name>.yaml``."""

from typing import Any

from .backfill import BackfillConfig
from .batching import BatchingConfig
from .breakdown import BreakdownConfig
from .grouping import GroupingConfig
from .invariance import InvarianceConfig
from .kv_budget import KvBudgetConfig
from .length import LengthConfig
from .report import ReportConfig
from .shallow import ShallowConfig
from .skipdecode import SkipDecodeConfig
from .slowest_row import SlowestRowConfig
from .speculative import SpeculativeConfig
from .suitability import SuitabilityConfig
from .thresholds import ThresholdsConfig
from .uniformity import UniformityRunConfig

SCHEMAS: dict[str, Any] = {  # by program
    "backfill": BackfillConfig,
    "batching": BatchingConfig,
    "breakdown": BreakdownConfig,
    "grouping": GroupingConfig,
    "invariance": InvarianceConfig,
    "kv_budget": KvBudgetConfig,
    "length": LengthConfig,
    "report": ReportConfig,
    "shallow": ShallowConfig,
    "skipdecode": SkipDecodeConfig,
    "slowest_row": SlowestRowConfig,
    "speculative": SpeculativeConfig,
    "suitability": SuitabilityConfig,
    "thresholds": ThresholdsConfig,
    "uniformity": UniformityRunConfig,
}
__all__ = [
    "SCHEMAS",
    "BackfillConfig",
    "BatchingConfig",
    "BreakdownConfig",
    "GroupingConfig",
    "InvarianceConfig",
    "KvBudgetConfig",
    "LengthConfig",
    "ReportConfig",
    "ShallowConfig",
    "SkipDecodeConfig",
    "SlowestRowConfig",
    "SpeculativeConfig",
    "SuitabilityConfig",
    "ThresholdsConfig",
    "UniformityRunConfig",
]
