"""Figure of eval.invariance."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import PALETTE, Level, Panel, Series

RULES = {
    "own": ("#009e73", "o"),
    "compact": ("#0072b2", "^"),
    "rebatch": ("#e69f00", "v"),
    "sync": ("#d55e00", "s"),
    "quantile": ("#56b4e9", "D"),
    "lockstep": ("#cc79a7", "P"),
}
KEYS = ["dtype", "runner"]


def invariance_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Answers that a batch changes, by its size and by dtype; the risk of the threshold under each rule.

    Rules that agree in all that a line shows are one line. The order of arrival is the last of the rows (``shuffled``
    where there is one); the other orders are dotted.

    Args:
        df: columns dtype, runner, rule, batch, order; changed, risk (0..1) with ``_low`` and ``_high``.
        about: tolerance, quantile.
    """
    df = df.assign(rule=df["rule"].replace("quantile", f"quantile {about['quantile']:g}"))
    first = df[df["dtype"] == "fp32"] if (df["dtype"] == "fp32").any() else df
    way = tuple(first.iloc[0][KEYS])
    main = df[(df["dtype"] == way[0]) & (df["runner"] == way[1])]
    order, batch = list(dict.fromkeys(df["order"]))[-1], int(df["batch"].max())
    name, percent = f"{way[0]}, {way[1]} runner", "answers that change (%), 95 % interval"
    rules = list(dict.fromkeys(df["rule"]))
    dotted = _dotted(main, rules, order)
    changed, risk = [*_lines(main, rules, "changed", order), *dotted], _lines(main, rules, "risk", order)
    largest = df[(df["batch"] == batch) & ((df["order"] == order) | (batch == 1))]
    bars = [_bars(largest, rule) for rule in rules]
    rows, tolerance = "rows of a batch", 100 * float(about["tolerance"])
    return [
        Panel(f"answers: {name}", f"{rows} (dotted: in another order)" if dotted else rows, percent, changed,
              x_log=True, legend="upper left", y_range=(-3.0, _top(changed))),
        Panel(f"answers: batch {batch}, by dtype", "dtype and runner", percent, bars, legend="upper left", columns=2,
              y_range=(0, _top(bars))),
        Panel(f"risk: {name}", rows, "mean loss to full depth (%), 95 % interval", risk, x_log=True,
              legend="upper left", columns=2, y_range=(0, max(_top(risk), 1.6 * tolerance)),
              levels=(Level("tolerance", tolerance), Level("full depth", 0.0, color="#000000"))),
    ]  # fmt: skip


def _look(rule: str) -> dict[str, Any]:
    color, marker = RULES.get(rule.partition(" ")[0], (PALETTE[-1], "X"))
    return {"color": color, "marker": marker}


def _points(part: pd.DataFrame, rule: str, column: str, order: str) -> pd.DataFrame:
    """By batch size, in percent; a row alone is the same in every order."""
    points = part[(part["rule"] == rule) & ((part["order"] == order) | (part["batch"] == 1))].sort_values("batch")
    names = [column, f"{column}_low", f"{column}_high"]
    return pd.concat([points["batch"], 100 * points[names]], axis=1).set_axis(["batch", "y", "low", "high"], axis=1)


def _lines(part: pd.DataFrame, rules: list[str], column: str, order: str) -> list[Series]:
    alike: dict[tuple[Any, ...], list[str]] = {}
    for rule in rules:
        points = _points(part, rule, column, order)
        if len(points):
            alike.setdefault(tuple(map(tuple, points.round(9).to_numpy())), []).append(rule)
    found = []
    for together in alike.values():
        points = _points(part, together[0], column, order)
        found.append(
            Series(
                ", ".join(together), list(points["batch"]), list(points["y"]), list(points["low"]),
                list(points["high"]), **_look(together[0]),
            )
        )  # fmt: skip
    return found


def _dotted(part: pd.DataFrame, rules: list[str], order: str) -> list[Series]:
    found = []
    for other in dict.fromkeys(part["order"]):
        for rule in rules:
            points = _points(part, rule, "changed", str(other))
            if other != order and points["y"].any():  # zeros are beneath the line that shows them
                found.append(
                    Series(
                        f"{rule}, {other}", list(points["batch"]), list(points["y"]), line=":", hollow=True,
                        legend=False, **_look(rule),
                    )
                )  # fmt: skip
    return found


def _bars(largest: pd.DataFrame, rule: str) -> Series:
    points = largest[largest["rule"] == rule]
    names = [f"{dtype} {runner}" for dtype, runner in zip(points["dtype"], points["runner"], strict=True)]
    y, low, high = (list(100 * points[column]) for column in ("changed", "changed_low", "changed_high"))
    zeros = ["" if each else "0" for each in y]
    return Series(rule, names, y, low, high, kind="bar", text=zeros, color=_look(rule)["color"])


def _top(series: list[Series]) -> float:
    """Room for the legend above the highest end."""
    return 1.5 * max([1.0, *(float(end) for each in series for end in (each.high or each.y))])
