"""Figures of the experiments, a file for each: rows in, panels out. No file is read or written here.

``draw_panels`` makes Axes of them, ``interactive`` a plotly figure.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from .backfill import backfill_panels
from .batching import batching_panels
from .breakdown import breakdown_panels
from .grouping import grouping_panels
from .interactive import interactive
from .invariance import invariance_panels
from .kv_budget import kv_budget_panels
from .length import length_panels
from .panels import Panel, draw_panels
from .shallow import shallow_panels
from .skipdecode import skipdecode_panels
from .slowest_row import slowest_row_panels
from .speculative import speculative_panels
from .suitability import suitability_panels
from .thresholds import thresholds_panels
from .uniformity import uniformity_panels

# by experiment: of the rows and the summary that it left
FIGURES: dict[str, Callable[[pd.DataFrame, Mapping[str, Any]], list[Panel]]] = {
    "backfill": backfill_panels,
    "batching": batching_panels,
    "breakdown": breakdown_panels,
    "grouping": grouping_panels,
    "invariance": invariance_panels,
    "kv_budget": kv_budget_panels,
    "length": length_panels,
    "shallow": shallow_panels,
    "skipdecode": skipdecode_panels,
    "slowest_row": slowest_row_panels,
    "speculative": speculative_panels,
    "suitability": suitability_panels,
    "thresholds": thresholds_panels,
    "uniformity": uniformity_panels,
}
ROWS = {"suitability": "layers"}  # where a summary does not call what is drawn ``rows``


def panels_of(experiment: str, summary: Mapping[str, Any]) -> list[Panel]:
    """What the figure of an experiment shows, from its summary.json alone; nothing where that has no rows."""
    rows = pd.DataFrame(summary[ROWS.get(experiment, "rows")])
    return [] if rows.empty else FIGURES[experiment](rows, summary)


__all__ = ["FIGURES", "Panel", "draw_panels", "interactive", "panels_of"]
