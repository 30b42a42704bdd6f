"""Figure of eval.thresholds."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of, marker_of
from .panels import BASELINE, Level, Panel, Series

HEADS = {"full": ("#0072b2", "-", "o"), "candidates": ("#e69f00", "--", "s"), "screened": ("#cc79a7", ":", "^")}
SCHEDULES = {"constant": "-", "decaying": "--", "decaying_released": ":"}
CURVE = ["measure", "schedule", "head"]
QUALITY = {
    "rouge_l": "ROUGE-L to the reference, 95 % interval",
    "rouge_l_minus_full": "ROUGE-L less full depth's, 95 % interval",
}


def thresholds_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against layers skipped: of the measures, of their schedules, of the heads; last, the random splits.

    Schedules and heads differ less than articles do, so theirs is the difference to full depth, article by article.
    Panels of schedules and heads are left out where there is nothing to compare.

    Args:
        df: rows of eval.thresholds, told apart by kind: ``full`` and ``static`` (layer), ``curve`` (measure, schedule,
            head), ``certified`` (the same and tolerance), each with rouge_l, rouge_l_minus_full and layers_skipped
            (0..1) and their _low and _high; ``splits`` (curve, tolerance, splits, held, below_one).
        about: error_prob.
    """
    curves = df[df["kind"] == "curve"].drop_duplicates(CURVE)[CURVE]
    full_head = curves[curves["head"] == "full"]
    own = full_head.drop_duplicates("measure")
    decaying = full_head[full_head.duplicated("measure", keep=False)]
    other = curves[curves["head"] != "full"]
    found = [_pareto("measures", df, [(each, "measure") for each in _named(own)], "rouge_l")]
    if not decaying.empty:
        found.append(_pareto("schedules", df, [(each, "schedule") for each in _named(decaying)]))
    if not other.empty:
        beside = own[own["measure"].isin(other["measure"])]
        heads = pd.concat([beside, other])
        found.append(_pareto(f"heads of {beside['measure'].iloc[0]}", df, [(each, "head") for each in _named(heads)]))
    return [*found, _splits(df[df["kind"] == "splits"], _named(own), 1 - float(about["error_prob"]))]


def _named(curves: pd.DataFrame) -> list[dict[str, str]]:
    return [{name: str(row[name]) for name in CURVE} for row in curves.to_dict("records")]


def _pareto(
    title: str, df: pd.DataFrame, curves: list[tuple[dict[str, str], str]], shown: str = "rouge_l_minus_full"
) -> Panel:
    full, static = (df[df["kind"] == kind] for kind in ("full", "static"))
    levels = [
        Level("full depth", row[shown], row[f"{shown}_low"], row[f"{shown}_high"], color="#000000")
        for row in full.to_dict("records")
    ]
    series, told = [], set[str]()
    for curve, differs in curves:
        name, color, line, marker = _look(curve, differs)
        series.append(_points(name, _of(df, "curve", curve), shown, color, line, marker))
    if not static.empty:
        series.append(_points("static depth", static, shown, BASELINE, "", "X"))
    for curve, differs in curves:
        _, color, _, marker = _look(curve, differs)
        certified = _of(df, "certified", curve)
        for _, same in certified[certified["layers_skipped"] > 0].groupby("threshold", sort=False):
            # the points of a measure's curves lie close together, so the first has the words for all
            text = None if curve["measure"] in told else [", ".join(f"{each:g}" for each in same["tolerance"])]
            x, y = [100 * same["layers_skipped"].iloc[0]], [same[shown].iloc[0]]
            series.append(Series("certified", x, y, kind="points", color=color, marker=marker, text=text, legend=False))
        told.add(curve["measure"])
    return Panel(
        f"{title} (filled: certified at a tolerance)", "decoder layers skipped (%)", QUALITY[shown], series,
        levels, x_range=(-3, 103), legend="lower left",
    )  # fmt: skip


def _look(curve: Mapping[str, str], differs: str) -> tuple[str, str, str, str]:
    """Name, colour, line and marker of a curve in a panel of what differs."""
    if differs == "head":
        return (f"{curve['head']} head", *HEADS[curve["head"]])
    color, marker = color_of(curve["measure"]), marker_of(curve["measure"])
    if differs == "schedule":
        return (f"{curve['measure']}, {curve['schedule']}", color, SCHEDULES[curve["schedule"]], marker)
    return (curve["measure"], color, "-", marker)


def _of(df: pd.DataFrame, kind: str, curve: Mapping[str, str]) -> pd.DataFrame:
    chosen = df["kind"] == kind
    for name, value in curve.items():
        chosen &= df[name] == value
    return df[chosen]


def _points(name: str, part: pd.DataFrame, shown: str, color: str, line: str, marker: str) -> Series:
    skipped = [100 * each for each in part["layers_skipped"]]
    quality, low, high = (list(part[column]) for column in (shown, f"{shown}_low", f"{shown}_high"))
    if not line:
        return Series(name, skipped, quality, low, high, kind="points", color=color, marker=marker, hollow=True)
    return Series(name, skipped, quality, low, high, color=color, line=line, marker=marker, hollow=True)


def _splits(df: pd.DataFrame, own: list[dict[str, str]], wanted: float) -> Panel:
    series = []
    for curve in own:
        part = _of(df, "splits", curve)
        held = [100 * kept / splits for kept, splits in zip(part["held"], part["splits"], strict=True)]
        names = [f"{each:g}" for each in part["tolerance"]]
        series.append(Series(curve["measure"], names, held, kind="bar", color=color_of(curve["measure"])))
    return Panel(
        "overlapping splits: an illustration", "tolerance",
        "splits whose other half lost no more (%)", series, [Level(f"{100 * wanted:g} %", 100 * wanted)],
        x_range=(-1.0, df["tolerance"].nunique() - 0.5), y_range=(0, 135), legend="upper left",
    )  # fmt: skip
