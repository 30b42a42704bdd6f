"""Figure of eval.kv_budget."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import MARKERS, PALETTE, Level, Panel, Series

ROLES = {  # colour, marker, name
    "project": ("#000000", "D", "no budget"),
    "budget": (PALETTE[0], "o", "budget of expected error"),
    "every": (PALETTE[1], "s", "full depth after k exits"),
    "threshold": (PALETTE[2], "^", "higher thresholds"),
    "true": (PALETTE[6], "X", "true keys and values"),
}


def kv_budget_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against layers of every way of spending more of them, and the table of expected errors.

    Args:
        df: rows of eval.kv_budget, told apart by kind: ``quality`` has role, value, rouge_l, to_full and layers with
            intervals; ``table`` skipped, edges, errors.
    """
    quality = df[df["kind"] == "quality"]
    return [
        _against_layers(quality, "rouge_l", "ROUGE-L to the reference, 95 % interval"),
        _against_layers(quality, "to_full", "ROUGE-L to full depth's answers, 95 % interval"),
        _table(df[df["kind"] == "table"]),
    ]


def _against_layers(df: pd.DataFrame, name: str, y: str) -> Panel:
    levels = [
        Level("full depth", row[name], row[f"{name}_low"], row[f"{name}_high"], color="#000000")
        for row in df[df["role"] == "full"].to_dict("records")
    ]
    series = []
    for role, (color, marker, label) in ROLES.items():
        part = df[df["role"] == role].sort_values("layers")
        if part.empty:
            continue
        middle, low, high = (list(part[f"{name}{end}"]) for end in ("", "_low", "_high"))
        text = [f"{value:g}" for value in part["value"]] if role in ("budget", "every") else None
        look: dict[str, Any] = {"color": color, "marker": marker, "text": text}
        look["kind"] = "points" if role in ("project", "true") else "line"
        series.append(Series(label, list(part["layers"]), middle, low, high, **look))
    return Panel("more layers, spent how?", "layers a token", y, series, levels, legend="lower right")


def _table(df: pd.DataFrame) -> Panel:
    rows = df.sort_values("skipped").to_dict("records")
    most, series = max(len(row["errors"]) for row in rows), []
    for place in range(most):
        mine = [row for row in rows if len(row["errors"]) in (1, most)]
        errors = [row["errors"][place if len(row["errors"]) > 1 else 0] for row in mine]
        name = f"cosines, part {place + 1} of {most}" if most > 1 else "all cosines"
        look: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}
        series.append(Series(name, [int(row["skipped"]) for row in mine], errors, **look))
    return Panel(
        "expected error of an exit, by cosine", "layers skipped", "|written - true| / |true|, mean over all layers",
        series, [Level("true", 0)], y_range=(-0.02, None), legend="upper left",
    )  # fmt: skip
