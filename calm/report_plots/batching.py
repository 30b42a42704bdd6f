"""Figure of eval.batching."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import PALETTE, Level, Panel, Series

STATIC = "static"
LOOKS = {  # by way: colour and marker
    STATIC: ("#7f7f7f", "p"),
    "own": ("#0072b2", "o"),
    "compact": ("#009e73", "^"),
    "rebatch": ("#56b4e9", "v"),
    "quantile 0.5": ("#e69f00", "P"),
    "quantile 0.9": ("#cc79a7", "X"),
    "lockstep": ("#a6761d", "D"),
    "sync": ("#d55e00", "s"),
}
RATIOS = {
    "tokens_ratio": ("all included", "tokens a second ÷ full depth's"),
    "decode_tokens_ratio": ("decode steps, encoder left out", "tokens a second ÷ full depth's"),
    "latency_ratio": ("time between tokens", "seconds between tokens ÷ full depth's"),
}


def batching_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Throughput, throughput of the decode steps and time between tokens over full depth at the same batch size, a line
    for each rule; the paper's bars beside those of its rule.

    Args:
        df: columns batch, kind (measured or simulated), way, and of each ratio its median, ``_low`` and ``_high``.
        about: measure, paper (eval.batching_told.paper_bars).
    """
    found = [_lines(df, name, legend=number == 0) for number, name in enumerate(RATIOS)]
    sync = df[df["way"] == "sync"]
    return [*found, _papers(sync, about)] if about["paper"] and not sync.empty else found


def _lines(df: pd.DataFrame, name: str, legend: bool) -> Panel:
    series = []
    shown = [way for way in LOOKS if way in set(df["way"])]
    shown += [way for way in dict.fromkeys(df["way"]) if way not in LOOKS and not way.startswith((STATIC, "full"))]
    for number, way in enumerate(shown):
        color, marker = LOOKS.get(way, (PALETTE[number % len(PALETTE)], "o"))
        look: dict[str, Any] = {"color": color, "marker": marker}
        part = df[df["way"] == way].sort_values("batch")
        measured, simulated = part[part["kind"] == "measured"], part[part["kind"] == "simulated"]
        if not simulated.empty:
            series.append(
                Series(way, list(simulated["batch"]), list(simulated[name]), line="--", hollow=True,
                       legend=measured.empty, **look)
            )  # fmt: skip
        if not measured.empty:
            low, high = list(measured[f"{name}_low"]), list(measured[f"{name}_high"])
            points = Series(way, list(measured["batch"]), list(measured[name]), low, high, kind="points", **look)
            series.append(points)
    title, y = RATIOS[name]
    rows = df["batch"]
    top = max(max(each.high or each.y) for each in series)
    least = min(min(each.low or each.y) for each in series)
    return Panel(
        title, "rows of a batch (dashed: by the cost table)", y, series,
        [Level("full depth", 1, color="#000000")], x_log=True, x_range=(0.7 * min(rows), 4.5 * max(rows)),
        y_range=(max(0.0, least - 0.1), top + (0.5 if legend else 0.1) * (top - min(least, 0.8))),
        legend="upper left" if legend else "none", columns=2,
    )  # fmt: skip


def _papers(sync: pd.DataFrame, about: Mapping[str, Any]) -> Panel:
    """The paper's batch is known by how many sequences its full depth decoded at once (Little's law)."""
    names, columns = ["tokens a second", "time between tokens"], ["tokens_ratio", "latency_ratio"]
    series = []
    for number, bar in enumerate(about["paper"]):
        model, rows = bar["model"].removeprefix("t5-v1_1-"), round(bar["full_rows"])
        values = [bar[column] for column in columns]
        shown = [(x, y) for x, y in zip(names, values, strict=True) if y is not None]
        color = ("#7f7f7f", "#bbbbbb")[number % 2]
        x, y = [each for each, _ in shown], [each for _, each in shown]
        series.append(Series(f"paper: {model}, {rows} → {bar['rows'] or 0:.0f} rows", x, y, kind="bar", color=color))
    wanted = about["paper"][0]["full_rows"]
    for kind, color in (("measured", "#d55e00"), ("simulated", "#e69f00")):
        part = sync[sync["kind"] == kind]
        if part.empty:
            continue
        row = min(part.to_dict("records"), key=lambda each: abs(math.log(each["batch"] / wanted)))
        low, high = ([row[f"{column}_{end}"] for column in columns] for end in ("low", "high"))
        label = f"ours, {row['batch']} rows, " + ("measured" if kind == "measured" else "by the cost table")
        series.append(Series(label, names, [row[column] for column in columns], low, high, kind="bar", color=color))
    top = max(max(each.y) for each in series)
    return Panel(
        f"sync, {about['measure']}: the paper's bars and ours", "", "÷ full depth's", series,
        [Level("full depth", 1, color="#000000")], y_range=(0, 1.6 * top), legend="upper left",
    )  # fmt: skip
