"""What eval.uniformity found."""

from collections.abc import Mapping
from typing import Any

from .words import listed, number, told


def said(summary: Mapping[str, Any]) -> list[str]:
    """Each uniform model against the plain one at equal quality: whether a token runs fewer layers, by rule."""
    found = []
    for model in dict.fromkeys(row["model"] for row in summary["equal"]):
        mine = [row for row in summary["equal"] if row["model"] == model]
        largest = max((row["batch"] for row in mine if row["batch"] is not None), default=None)
        told = [_against(row) for row in mine if row["batch"] in (None, largest)]
        found.append(f"{model}, where ROUGE-L is {summary['close']:g} below the plain full depth: {'; '.join(told)}.")
    if found:
        found.append("Of each recipe there is one training: intervals are over articles, not over trainings.")
    return found


def _against(row: Mapping[str, Any]) -> str:
    where = f"{row['measure']} under {row['rule']}" + ("" if row["batch"] is None else f" at batch {row['batch']}")
    both = (("it", row["layers"]), ("the plain model", row["plain_layers"]))
    if missing := [name for name, value in both if value is None]:
        return f"{where} no threshold of {listed(missing)} ends there"
    layers = f"{number(row['layers'])} layers against {number(row['plain_layers'])}"
    if row["fewer_low"] is None or row["fewer_low"] <= 0 <= row["fewer_high"]:
        return f"{where} cannot be told apart, {layers} ({told(row, 'fewer')} fewer)"
    word = "fewer" if row["fewer_low"] > 0 else "more"
    return f"{where} {word}, {layers} ({told(row, 'fewer')} fewer)"
