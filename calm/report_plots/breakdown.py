"""Figure of eval.breakdown."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import Level, Panel, Series

WAYS = ("full", "static", "own", "compact")
STEPS = 3  # batch sizes with a panel of their own
PARTS = {  # of a step: columns whose sum it is, colour
    "source's keys and values": (("cross_ms",), "#0072b2"),
    "rest of the layers": (("layers_ms",), "#56b4e9"),
    "checks": (("checks_ms",), "#d55e00"),
    "head": (("head_ms", "read_ms"), "#e69f00"),
    "backfill": (("backfill_ms",), "#009e73"),
    "encoder": (("prefill_ms",), "#cc79a7"),
    "packing, calls": (("packing_ms",), "#f0e442"),
    "host": (("host_ms", "start_ms", "slots_ms"), "#7f7f7f"),
}
GAP = {  # items, and the colours of the same thing above
    "waiting": ("for the slowest row", "#000000"),
    "smaller batches": ("smaller batches", "#a6761d"),
    **{item: (item, PARTS[item][1]) for item in ("checks", "head", "backfill", "encoder")},
    "packing": ("packing, calls", PARTS["packing, calls"][1]),
    "host": ("host", PARTS["host"][1]),
}


def breakdown_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Milliseconds of a step by what they went to, a panel for each of the first batch sizes; last, as a share of full
    depth's step, what the mean layer's share is and what comes on top.

    Args:
        df: columns batch, way, a ``_ms`` for each phase, cross_ms, step_ms, ideal_ms, gap_ITEM_ms.
        about: nothing is read.
    """
    batches = sorted(set(df["batch"]))
    found = [_step(df[df["batch"] == batch], batch, legend=number == 0) for number, batch in enumerate(batches[:STEPS])]
    return [*found, _gap(df, batches)]


def _step(df: pd.DataFrame, batch: int, legend: bool) -> Panel:
    at = {row["way"]: row for row in df.to_dict("records")}
    ways = [way for way in WAYS if way in at]
    series = []
    for part, (columns, color) in PARTS.items():
        heights = [sum(_number(at[way][column]) for column in columns) for way in ways]
        if part == "rest of the layers":
            heights = [height - _number(at[way]["cross_ms"]) for height, way in zip(heights, ways, strict=True)]
        series.append(Series(part, ways, heights, kind="stack", color=color))
    top = max(at[way]["step_ms"] for way in ways)
    return Panel(
        f"batch {batch}", "", f"ms of a step of {batch} token{'s' if batch > 1 else ''}", series,
        y_range=(0, (1.6 if legend else 1.1) * top), legend="upper right" if legend else "none", columns=2,
    )  # fmt: skip


def _gap(df: pd.DataFrame, batches: list[int]) -> Panel:
    """Stacks from 0: what the layers' share leaves, then the items; one that is below 0 hangs under it."""
    full = {row["batch"]: row["step_ms"] for row in df[df["way"] == "full"].to_dict("records")}
    rows = [
        row
        for batch in batches
        for way in WAYS[1:]
        for row in df[(df["batch"] == batch) & (df["way"] == way)].to_dict("records")
    ]
    names = [f"{row['batch']} {row['way'][0]}" for row in rows]

    def shares(column: str) -> list[float]:
        return [100 * row[column] / full[row["batch"]] for row in rows]

    series = [Series("layers' share", names, shares("ideal_ms"), kind="stack", color="#cccccc")]
    for item, (label, color) in GAP.items():
        series.append(Series(label, names, shares(f"gap_{item}_ms"), kind="stack", color=color))
    total = shares("step_ms")
    series.append(Series("in fact", names, total, kind="points", color="#000000", marker="D"))
    return Panel(
        "what comes on top of the layers' share", "batch; s: static, o: own, c: compact",
        "% of full depth's step", series, [Level("full depth", 100, color="#000000")],
        y_range=(min(0.0, *_below(series)) - 3, 1.75 * max(100, *total)), legend="upper left", columns=2,
    )  # fmt: skip


def _below(series: list[Series]) -> list[float]:
    """How far each stack hangs below 0."""
    stacks = [each.y for each in series if each.kind == "stack"]
    return [sum(min(0.0, y) for y in heights) for heights in zip(*stacks, strict=True)]


def _number(value: Any) -> float:
    return 0.0 if pd.isna(value) else float(value)
