"""Figure of eval.shallow."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of, marker_of
from .panels import Level, Panel, Series

FIXED = {"static": ("#7f7f7f", "X"), "trained shallow": ("#cc79a7", "D")}  # colour and marker of what is not adaptive


def shallow_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against the clock, a panel for each batch size.

    Args:
        df: columns way, role (full, static, trained shallow, exit), depth, measure, threshold, marked, batch, rouge_l,
            decode_tokens_ratio and the intervals of both.
        about: tolerance.
    """
    return [_panel(part, int(batch), float(about["tolerance"])) for batch, part in df.groupby("batch")]


def _panel(df: pd.DataFrame, batch: int, tolerance: float) -> Panel:
    full = df[df["role"] == "full"].iloc[0]
    series = []
    for role, (color, marker) in FIXED.items():
        part = df[df["role"] == role].sort_values("depth")
        if not part.empty:
            depths = [f"{depth:g}" for depth in part["depth"]]
            series.append(_points(role, part, color=color, marker=marker, text=depths))
    exits = df[df["role"] == "exit"]
    for measure, part in exits.groupby("measure", sort=False):
        part, color, marker = part.sort_values("decode_tokens_ratio"), color_of(str(measure)), marker_of(str(measure))
        clock, quality = list(part["decode_tokens_ratio"]), list(part["rouge_l"])
        series.append(Series(f"exits by {measure}", clock, quality, color=color, marker=marker))
        chosen = part[part["marked"].astype(bool)]
        if not chosen.empty:
            series.append(_points(f"{measure}, risk {tolerance:g}", chosen, color=color, marker=marker))
    levels = [
        Level("full depth", full["rouge_l"], full["rouge_l_low"], full["rouge_l_high"], color="#000000"),
        Level("full depth", 1.0, upright=True, color="#000000"),
    ]
    return Panel(
        f"batch {batch}", "decode steps by time, over full depth's", "ROUGE-L to the reference, 95 % interval", series,
        levels, legend="lower left",
    )  # fmt: skip


def _points(name: str, part: pd.DataFrame, **look: Any) -> Series:
    clock, clock_low, clock_high = (list(part[f"decode_tokens_ratio{end}"]) for end in ("", "_low", "_high"))
    quality, low, high = (list(part[f"rouge_l{end}"]) for end in ("", "_low", "_high"))
    return Series(name, clock, quality, low, high, clock_low, clock_high, kind="points", **look)
