"""Figure of eval.grouping."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..plotting import color_of
from .panels import PALETTE, Level, Panel, Series

WAYS = {  # how requests are put together: colour, line, marker
    "random": (PALETTE[6], "-", "o"),
    "length": (PALETTE[4], "-", "v"),
    "encoder": (PALETTE[0], "-", "s"),
    "online": (PALETTE[2], "-", "^"),
    "oracle": (PALETTE[1], "--", "D"),
    "step oracle": (PALETTE[3], "--", "P"),
}


def grouping_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Layers of a step for each row of the table; speed over full depth; predicted depth against true depth.

    Drawn is rule own at the smallest pool; speed and predictions of the first row.

    Args:
        df: column part. Of part counted: row, batch, grouping, pool, rule, step_layers and gain with their _low and
            _high. Of part timed, which may be missing: batch, rule, grouping, gain. Of part bins, which may be missing:
            predicted, true and its _low and _high. Of part predictor: row, key, r2.
        about: num_layers, mean_depth.
    """
    first = str(df["row"].iloc[0])
    if (df["part"] != "counted").all():
        return _told(df, first, about)
    counted = df[(df["part"] == "counted") & (df["rule"].isin(["own", "static"]))]
    pool = int(counted.loc[counted["pool"] > 1, "pool"].min())
    counted = counted[counted["pool"].isin([1, pool])]
    found = [_layers(str(name), counted[counted["row"] == name], about, pool) for name in dict.fromkeys(counted["row"])]
    gain = _gain(first, counted[counted["row"] == first], df[df["part"] == "timed"], pool)
    return [*found, gain, *_told(df, first, about)]


def _layers(name: str, part: pd.DataFrame, about: Mapping[str, Any], pool: int) -> Panel:
    last, own = int(about["num_layers"]), float(about["mean_depth"][name])
    batches = sorted({int(each) for each in part["batch"]})
    series = [_way(way, part, "step_layers") for way in WAYS if (part["grouping"] == way).any()]
    series.append(Series("a row alone", batches, [own] * len(batches), color="#000000", line="--", marker=""))
    return Panel(
        f"{name}: own and sync, pool of {pool} batches", "rows of a batch",
        "layers that a step runs, mean and 95 % interval", series, [Level("full depth", last)], x_log=True,
        y_range=(0.0, 1.55 * last), legend="upper left", columns=2,
    )  # fmt: skip


def _gain(name: str, part: pd.DataFrame, timed: pd.DataFrame, pool: int) -> Panel:
    series = [_way(way, part, "gain") for way in WAYS if (part["grouping"] == way).any()]
    static = part[part["rule"] == "static"].sort_values("batch")
    if not static.empty:
        depth = float(static["step_layers"].iloc[0])
        series.append(
            Series(f"static, {depth:g} layers", list(static["batch"]), list(static["gain"]),
                   color=color_of("static-half"), line=":", marker="")
        )  # fmt: skip
    for rule in ("own", "static"):
        for way, points in timed[timed["rule"] == rule].groupby("grouping", sort=False):
            color, _, marker = WAYS[str(way)] if rule == "own" else (color_of("static-half"), "", "X")
            series.append(
                Series(f"{way} (timed)", list(points["batch"]), list(points["gain"]), list(points["gain_low"]),
                       list(points["gain_high"]), kind="points", color=color, marker=marker, legend=False)
            )  # fmt: skip
    high = max(1.0, max(max(each.high or each.y) for each in series))
    low = min(1.0, min(min(each.low or each.y) for each in series))
    return Panel(
        f"{name}, own: predicted; filled: timed", "rows of a batch",
        "tokens/s over full depth (95 %; timed: all rounds)", series, [Level("full depth", 1.0)], x_log=True,
        y_range=(low - 0.05 * high, high + 0.7 * (high - low) + 0.1), legend="upper left", columns=2,
    )  # fmt: skip


def _way(way: str, part: pd.DataFrame, value: str) -> Series:
    color, line, marker = WAYS[way]
    points = part[part["grouping"] == way].sort_values("batch")
    middle, low, high = (list(points[f"{value}{end}"]) for end in ("", "_low", "_high"))
    return Series(
        way, list(points["batch"]), middle, low, high, color=color, line=line, marker=marker, hollow=value == "gain"
    )


def _worth(told: Any) -> str:
    """R² with its interval; nothing where all depths are one, or all predictions."""
    if pd.isna(told["r2"]):
        return ""
    return f", R² {told['r2']:.2f} [{told['r2_low']:.2f}, {told['r2_high']:.2f}]"


def _told(df: pd.DataFrame, name: str, about: Mapping[str, Any]) -> list[Panel]:
    part = df[(df["row"] == name) & (df["part"] == "bins")]
    if part.empty:
        return []
    told = df[(df["row"] == name) & (df["part"] == "predictor") & (df["key"] == "encoder")].iloc[0]
    points = part.sort_values("predicted")
    ends = [float(points["predicted"].min()), float(points["predicted"].max())]
    bins = Series(
        "tenths of the articles" if len(points) == 10 else "articles by prediction", list(points["predicted"]),
        list(points["true"]), list(points["true_low"]), list(points["true_high"]), kind="points", color=color_of(name),
    )  # fmt: skip
    same = Series("as predicted", ends, ends, color="#7f7f7f", line="--", marker="")
    return [
        Panel(
            f"{name}: told by the encoder" + _worth(told),
            "predicted mean depth of an answer (layers)",
            "true mean depth (layers), mean and 95 % interval",
            [bins, same],
            [Level("all answers", float(about["mean_depth"][name]))],
            legend="upper left",
        )  # fmt: skip
    ]
