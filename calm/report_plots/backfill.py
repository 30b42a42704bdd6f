"""Figure of eval.backfill."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import MARKERS, PALETTE, Level, Panel, Series

FILLS = {
    "full": ("#000000", "full depth"),
    "true": ("#009e73", "true"),
    "project": ("#0072b2", "project"),
    "copy": ("#d55e00", "copy"),
    "mask": ("#cc79a7", "mask"),
    "other article": ("#7f7f7f", "another article's"),
}
MARKS = dict(zip(FILLS, MARKERS, strict=False))


def backfill_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Ways of filling skipped layers: ROUGE-L of each, agreement by position, errors of keys and values.

    Args:
        df: rows of eval.backfill, told apart by kind: ``quality`` has variant, rouge_l and its interval; ``position``
            variant, position, equal and its interval; ``error`` variant, cache, skipped, key, value and intervals
            (``alone``: over a true cache); ``clock`` and ``pass``, which may be missing, batch, skipped and of_true, or
            positions and of_layers.
    """
    clock, passes = df[df["kind"] == "clock"], df[df["kind"] == "pass"]
    return [
        _quality(df[df["kind"] == "quality"]),
        _agreement(df[(df["kind"] == "position") & (df["variant"] != "full")]),
        _errors(df[df["kind"] == "error"]),
        *([] if clock.empty else [_clock(clock, passes)]),
    ]


def _quality(df: pd.DataFrame) -> Panel:
    levels = [
        Level("full depth", row["rouge_l"], row["rouge_l_low"], row["rouge_l_high"], color=FILLS["full"][0])
        for row in df[df["variant"] == "full"].to_dict("records")
    ]
    points = [
        Series(FILLS[row["variant"]][1], [row["variant"]], [row["rouge_l"]], [row["rouge_l_low"]],
               [row["rouge_l_high"]], kind="points", color=FILLS[row["variant"]][0])
        for row in df[df["variant"] != "full"].to_dict("records")
    ]  # fmt: skip
    return Panel(
        "quality", "keys and values of skipped layers", "ROUGE-L to the reference, 95 % interval", points, levels,
        x_range=(-1.0, len(points) - 0.5), legend="none",
    )  # fmt: skip


def _agreement(df: pd.DataFrame) -> Panel:
    series = []
    for variant in dict.fromkeys(df["variant"]):
        part = df[df["variant"] == variant].sort_values("position")
        equal, low, high = ([100 * each for each in part[name]] for name in ("equal", "equal_low", "equal_high"))
        color, label = FILLS[variant]
        series.append(Series(label, list(part["position"]), equal, low, high, color=color, marker=MARKS[str(variant)]))
    return Panel(
        "agreement with full depth", "position in full depth's answer (tokens)",
        "tokens equal to full depth's (%), 95 % interval", series, [Level("full depth", 100, color=FILLS["full"][0])],
        y_range=(0, 110), legend="lower left",
    )  # fmt: skip


def _errors(df: pd.DataFrame) -> Panel:
    series = []
    for variant, cache in dict.fromkeys(zip(df["variant"], df["cache"], strict=True)):
        if (variant, cache) == ("copy", "true"):
            continue  # hardly another line than over its own cache
        color, label = FILLS[variant]
        marker = MARKS[str(variant)]
        if variant == "project" and cache == "true":  # most of it lies under the line of its own cache
            color, label, marker = "#56b4e9", "project, alone", "X"
        part = df[(df["variant"] == variant) & (df["cache"] == cache)].sort_values("skipped")
        for what, line in (("key", "-"), ("value", "--")):
            middle, low, high = (list(part[name]) for name in (what, f"{what}_low", f"{what}_high"))
            series.append(
                Series(label, list(part["skipped"]), middle, low, high, color=color, line=line, marker=marker,
                       legend=what == "key")
            )  # fmt: skip
    return Panel(
        "keys (solid) and values (dashed)", "layers above the exit", "|written - true| / |true|, 95 % interval", series,
        [Level("true", 0, color=FILLS["true"][0])], y_range=(-0.05, 1.9), legend="upper left", columns=2,
    )  # fmt: skip


def _clock(df: pd.DataFrame, passes: pd.DataFrame) -> Panel:
    series = []
    for number, (batch, part) in enumerate(df.groupby("batch")):
        points = part.sort_values("skipped")
        share = [100 * each for each in points["of_true"]]
        color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
        series.append(Series(f"batch {batch:g}", list(points["skipped"]), share, color=color, marker=marker))
    at_once = [] if passes.empty else list(passes.groupby("positions"))
    for number, (count, part) in enumerate(at_once, start=len(series)):
        points = part.sort_values("skipped")
        share = [100 * each for each in points["of_layers"]]
        color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
        label = f"true, {count:g} at once"
        series.append(Series(label, list(points["skipped"]), share, color=color, line="--", marker=marker))
    return Panel(
        "time of project, and of true at once", "layers above the exit", "share of running these layers (%), median",
        series, [Level("true: the layers run", 100)], y_range=(0, 160), legend="upper left", columns=2,
    )  # fmt: skip
