"""What eval.uniformity found."""

from collections.abc import Mapping
from typing import Any


def said(summary: Mapping[str, Any]) -> list[str]:
    """Each uniform model against the plain one at equal quality: whether a token runs fewer layers, by rule."""
    found = []
    for model in dict.fromkeys(row["model"] for row in summary["equal"]):
        mine = [row for row in summary["equal"] if row["model"] == model]
        largest = max((row["batch"] for row in mine if row["batch"] is not None), default=None)
        told = [_against(row) for row in mine if row["batch"] in (None, largest)]
        found.append(f"{model}, where ROUGE-L is {summary['close']:g} below the plain full depth: {'; '.join(told)}.")
    return found


def _against(row: Mapping[str, Any]) -> str:
    where = f"{row['measure']} under {row['rule']}" + ("" if row["batch"] is None else f" at batch {row['batch']}")
    layers = f"{row['layers']:.2f} layers against {row['plain_layers']:.2f}"
    between = f"[{row['fewer_low']:+.2f}, {row['fewer_high']:+.2f}]"
    if row["fewer_low"] > 0:
        return f"{where} fewer, {layers} ({row['fewer']:+.2f} {between})"
    if row["fewer_high"] < 0:
        return f"{where} more, {layers} ({row['fewer']:+.2f} {between})"
    return f"{where} cannot be told apart, {layers} ({row['fewer']:+.2f} {between})"
