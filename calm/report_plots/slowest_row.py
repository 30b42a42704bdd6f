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
    "lockstep": ("#009e73", "", "P"),
}
LAYERS = "layers that a token runs, mean and 95 % interval"


def slowest_row_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Where tokens stop against the batch size, a panel for each row of the table; how often a step ends early; last,
    the share of hard rows.

    Args:
        df: columns row, batch, hard_share (null: drawn plainly), rule, decoded (by the engine, or drawn from records),
            layers, stops_early and their _low and _high.
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
        drawn, decoded = part[~part["decoded"].astype(bool)], part[part["decoded"].astype(bool)]
        series = [_rule(str(rule), number, drawn) for number, rule in enumerate(dict.fromkeys(drawn["rule"]))]
        series += [_rule(str(rule), 0, decoded, ", decoded") for rule in dict.fromkeys(decoded["rule"])]
        found.append(
            Panel(f"{name}: random batches", "rows of a batch", series=series, x_log=True, legend="upper left",
                  columns=2, **shape)
        )  # fmt: skip
    found.append(_early(plain[(plain["rule"] == "sync") & ~plain["decoded"].astype(bool)]))
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


def _rule(rule: str, number: int, part: pd.DataFrame, beside: str = "") -> Series:
    color, line, marker = RULES.get(rule, (PALETTE[2 + number % 3], "-", "D"))
    points = part[part["rule"] == rule].sort_values("batch")
    batch, layers, low, high = (list(points[name]) for name in ("batch", "layers", "layers_low", "layers_high"))
    if beside:
        return Series(rule + beside, batch, layers, low, high, kind="points", color=color, marker=marker)
    return Series(rule, batch, layers, low, high, color=color, line=line, marker=marker)


def _early(df: pd.DataFrame) -> Panel:
    """Under sync, of every row of the table."""
    series = []
    for name, marker in zip(dict.fromkeys(df["row"]), MARKERS, strict=False):
        points = df[df["row"] == name].sort_values("batch")
        share, low, high = ([100 * each for each in points[f"stops_early{end}"]] for end in ("", "_low", "_high"))
        batches, color = list(points["batch"]), color_of(str(name))
        series.append(Series(str(name), batches, share, low, high, color=color, marker=marker))
    return Panel(
        "sync: steps that end below the last layer", "rows of a batch", "tokens of such steps (%), 95 % interval",
        series, [Level("full depth", 0.0)], x_log=True, y_range=(-3, 125), legend="upper right",
    )  # fmt: skip
