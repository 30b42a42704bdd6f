"""Figure of eval.slowest_row."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of
from .panels import MARKERS, PALETTE, Level, Panel, Series

RULES = {
    "own": ("#000000", "--", "o"),
    "sync": ("#d55e00", "-", "s"),
    "quantile 0.9": ("#0072b2", "-", "^"),
    "quantile 0.5": ("#56b4e9", "-", "v"),
}
LAYERS = "layers that a token runs, mean and 95 % interval"


def slowest_row_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Where tokens stop against the batch size, a panel for each row of the table; last, the share of hard rows.

    Args:
        df: columns row, batch, hard_share (null: drawn plainly), rule, layers, layers_low, layers_high.
        about: num_layers.
    """
    plain, mixed = df[df["hard_share"].isna()], df[df["hard_share"].notna() & (df["rule"] == "sync")]
    last = int(about["num_layers"])
    shape: dict[str, Any] = {
        "y": LAYERS, "levels": (Level("full depth", last),), "y_range": (0.0, 1.3 * last)
    }  # fmt: skip
    found = []
    for name in dict.fromkeys(df["row"]):
        part = plain[plain["row"] == name]
        series = [_rule(str(rule), number, part) for number, rule in enumerate(dict.fromkeys(part["rule"]))]
        found.append(
            Panel(f"{name}: random batches", "rows of a batch", series=series, x_log=True, legend="upper left",
                  columns=2, **shape)
        )  # fmt: skip
    if mixed.empty:
        return found
    series = []
    marks = dict(zip(dict.fromkeys(mixed["row"]), MARKERS * 7, strict=False))
    for (name, batch), part in mixed.groupby(["row", "batch"], sort=False):
        points, line = part.sort_values("hard_share"), "-" if batch == mixed["batch"].max() else ":"
        share = [100 * each for each in points["hard_share"]]
        color = color_of(str(name))
        series.append(
            Series(f"{name}, batch {batch}", share, list(points["layers"]), color=color, line=line, marker=marks[name])
        )
    found.append(Panel("sync: mixtures", "hard rows in a batch (%)", series=series, legend="lower right", **shape))
    return found


def _rule(rule: str, number: int, part: pd.DataFrame) -> Series:
    color, line, marker = RULES.get(rule, (PALETTE[2 + number % 3], "-", "D"))
    points = part[part["rule"] == rule].sort_values("batch")
    return Series(
        rule, list(points["batch"]), list(points["layers"]), list(points["layers_low"]), list(points["layers_high"]),
        color=color, line=line, marker=marker,
    )  # fmt: skip
