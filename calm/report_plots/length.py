"""Figure of eval.length."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of
from .panels import MARKERS, PALETTE, Level, Panel, Series

QUARTERS = {1: "shortest", 2: "2nd", 3: "3rd", 4: "longest"}


def length_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Layers skipped by quartile of length; what a cost table predicts by answer length; layers skipped by position.

    Args:
        df: column part. Of part records: row, by (source, output, position), group, layers_skipped (0..1) and its
            _low and _high. Of part predicted, which may be missing: source, batch, tokens, call_ratio and its _low
            and _high; drawn is the largest batch.
    """
    kept, told = df[df["part"] == "records"], df[df["part"] == "predicted"]
    lines = {"source": "-", "output": "--"}
    marks = dict(zip(dict.fromkeys(kept["row"]), MARKERS * 7, strict=False))
    by_length = [
        _skipped(
            f"{name}, {kind}",
            part,
            [QUARTERS[int(each)] for each in part["group"]],
            str(name),
            marks[name],
            lines[str(kind)],
        )
        for (name, kind), part in kept[kept["by"].isin(lines)].groupby(["row", "by"], sort=False)
    ]
    by_position = [
        _skipped(str(name), part, list(part["group"]), str(name), marks[name])
        for name, part in kept[kept["by"] == "position"].groupby("row", sort=False)
    ]
    shape: dict[str, Any] = {
        "y": "layers skipped (%), mean and 95 % interval", "levels": (Level("full depth", 0.0),), "y_range": (-2, 110),
        "legend": "upper center",
    }  # fmt: skip
    found = [
        Panel("recorded answers by length", "quartile of tokens, source or full answer", series=by_length, columns=2,
              **shape)
    ]  # fmt: skip
    if not told.empty:
        found.append(_gain(told[told["batch"] == told["batch"].max()]))
    return [
        *found,
        Panel("recorded answers by position", "token of the answer", series=by_position, columns=3, **shape),
    ]


def _skipped(label: str, part: pd.DataFrame, x: list[Any], row: str, marker: str, line: str = "-") -> Series:
    middle, low, high = (
        [100 * each for each in part[name]] for name in ("layers_skipped", "layers_skipped_low", "layers_skipped_high")
    )
    return Series(label, x, middle, low, high, color=color_of(row), line=line, marker=marker)


def _gain(told: pd.DataFrame) -> Panel:
    series = []
    for number, (source, part) in enumerate(told.groupby("source")):
        points = part.sort_values("tokens")
        ratio, low, high = (list(points[name]) for name in ("call_ratio", "call_ratio_low", "call_ratio_high"))
        series.append(
            Series(f"{source:g} source tokens", list(points["tokens"]), ratio, low, high, color=PALETTE[number % 7],
                   marker=MARKERS[number % 7])
        )  # fmt: skip
    top = max(1.0, float(told["call_ratio"].max()))
    return Panel(
        f"whole call, batch {told['batch'].max():g}: predicted, not timed", "tokens of the answer",
        "full depth / exits, by a measured cost table", series, [Level("full depth", 1.0)], x_log=True,
        y_range=(min(0.95, 0.98 * float(told["call_ratio"].min())), 1.15 * top), legend="upper left", columns=2,
    )  # fmt: skip
