"""Figure of eval.shallow."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of, marker_of
from .panels import Level, Panel, Series

FIXED = {  # what is not adaptive: name, colour, marker
    "static": ("static depth", "#7f7f7f", "X"),
    "trained": ("trained with so many layers", "#cc79a7", "D"),
}


def shallow_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against the clock, a panel for each batch size.

    Args:
        df: columns way, role (full, static, trained, exit), depth, measure, threshold, marked, batch; rouge_l and
            decode_tokens_ratio with their intervals.
        about: tolerance.
    """
    tolerance = float(about["tolerance"])
    return [
        _panel(part, int(batch), tolerance, legend=number == 0)
        for number, (batch, part) in enumerate(df.groupby("batch"))
    ]


def _panel(df: pd.DataFrame, batch: int, tolerance: float, legend: bool) -> Panel:
    levels = [Level("full depth", 1.0, upright=True, color="#000000")]
    for full in df[df["role"] == "full"].to_dict("records"):
        levels.append(Level("full depth", full["rouge_l"], full["rouge_l_low"], full["rouge_l_high"], color="#000000"))
    series = []
    for role, (name, color, marker) in FIXED.items():
        part = df[df["role"] == role].sort_values("depth")
        if not part.empty:
            depths = [f"{depth:g}" for depth in part["depth"]]
            series.append(_points(name, part, color=color, marker=marker, text=depths))
    for measure, part in df[df["role"] == "exit"].groupby("measure", sort=False):
        color, marker = color_of(str(measure)), marker_of(str(measure))
        part = part.sort_values("decode_tokens_ratio")
        clock, quality, low, high = (
            list(part[name]) for name in ("decode_tokens_ratio", "rouge_l", "rouge_l_low", "rouge_l_high")
        )
        series.append(Series(f"exits by {measure}", clock, quality, low, high, color=color, marker=marker, hollow=True))
        chosen = part[part["marked"].astype(bool)]
        if not chosen.empty:
            series.append(_points(f"{measure}, risk {tolerance:g}", chosen, color=color, marker=marker))
    return Panel(
        f"batch {batch}", "tokens/s of decoding, over full depth's", "ROUGE-L to the reference, 95 % interval",
        series, levels, legend="lower left" if legend else "none",
    )  # fmt: skip


def _points(name: str, part: pd.DataFrame, **look: Any) -> Series:
    clock, clock_low, clock_high = (list(part[f"decode_tokens_ratio{end}"]) for end in ("", "_low", "_high"))
    quality, low, high = (list(part[f"rouge_l{end}"]) for end in ("", "_low", "_high"))
    return Series(name, clock, quality, low, high, clock_low, clock_high, kind="points", **look)
