"""Figure of eval.suitability."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import Level, Panel, Series


def suitability_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """What each layer says beside the last one, and how little the residual stream still turns.

    Args:
        df: a row for each layer 1..L; columns layer; agree, margin and cosine with ``_low`` and ``_high``; first,
            settled (shares of tokens, 0..1); cosine is null at layer 1.
    """
    layers, last = list(df["layer"]), int(df["layer"].max())
    bars = [
        Series(name, layers, [100 * each for each in df[column]], kind="bar", color=color)
        for name, column, color in (
            ("oracle: first layer that agrees", "first", "#56b4e9"),
            ("and from which on all agree", "settled", "#e69f00"),
        )
    ]
    shape: dict[str, Any] = {
        "x": "decoder layer", "levels": (Level("full depth", last, upright=True),), "legend": "upper left"
    }  # fmt: skip
    agree = _band(df, "agree", 100, "#000000", "o", "says the full model's word")
    sure = [
        _band(df, "cosine", 1, "#d55e00", "s", "state: cosine with the layer below"),
        _band(df, "margin", 1, "#0072b2", "^", "softmax: top-1 minus top-2 probability"),
    ]
    return [
        Panel("what each layer would say", y="share of tokens (%), 95 % interval", series=[*bars, agree],
              y_range=(0, 135), **shape),
        Panel("how sure it is", y="mean confidence, 95 % interval", series=sure, y_range=(0, 1.35), **shape),
    ]  # fmt: skip


def _band(df: pd.DataFrame, name: str, scale: int, color: str, marker: str, label: str) -> Series:
    points = df.dropna(subset=[name])
    middle, low, high = (
        [scale * float(each) for each in points[column]] for column in (name, f"{name}_low", f"{name}_high")
    )
    return Series(label, list(points["layer"]), middle, low, high, color=color, marker=marker)
