"""What eval.kv_budget found."""

from collections.abc import Mapping
from typing import Any

from .words import listed, number, sign, told

Row = Mapping[str, Any]
GAP = "rouge_l_minus_project"
OTHERS = {"every": "a step at full depth after so many exits whatever their error", "threshold": "a higher threshold"}
VERDICT = {1: "gains", 0: "cannot be told apart", -1: "loses"}


def said(summary: Mapping[str, Any]) -> list[str]:
    """Whether budgets gain ROUGE-L over the same exits without one, what they cost, and what else layers would buy."""
    rows = [row for row in summary["rows"] if row["kind"] == "quality"]
    plain = [row for row in rows if row["role"] == "project"]
    budgets = [row for row in rows if row["role"] == "budget"]
    found = []
    if plain and budgets:
        each = [
            f"{row['value']:g} with {number(row['layers'])} layers {VERDICT[sign(row, GAP)]} ({told(row, GAP, 4)})"
            for row in budgets
        ]
        found.append(
            f"Beside the same exits without a budget ({number(plain[0]['layers'])} layers a token), ROUGE-L of a "
            f"budget of {listed(each)}."
        )
    pairs = [row for row in summary["rows"] if row["kind"] == "pair"]
    for role, name in OTHERS.items():
        mine = [
            f"{row['way']} {VERDICT[sign(row, 'to_full_gained')]} ({told(row, 'to_full_gained', 4)} at "
            f"{number(row['layers'])} layers against {number(row['other_layers'])} of {row['other']})"
            for row in pairs
            if row["role"] == role
        ]
        if mine:
            found.append(f"In ROUGE-L to full depth's answers, beside {name} of nearest layers, {listed(mine)}.")
            gains = [row for row in pairs if row["role"] == role and sign(row, "rouge_l_gained")]
            each = [
                f"{row['way']} {VERDICT[sign(row, 'rouge_l_gained')]} ({told(row, 'rouge_l_gained', 4)})"
                for row in gains
            ]
            verdict = listed(each) if each else "none can be told apart"
            found.append(f"In ROUGE-L to the references, beside the same, {verdict}.")
    return found + [_fit(row) for row in summary["rows"] if row["kind"] == "fit"]


def _fit(row: Row) -> str:
    """What the table is worth on articles that it was not made from."""
    cosine = "" if row["correlation"] is None else (
        f"; over exits the correlation with what came is {number(row['correlation'])}"
        + ("" if row["by_skipped"] is None else f", and {number(row['by_skipped'])} by layers skipped alone")
    )  # fmt: skip
    return f"The table expects an error of {told(row, 'expected', 3)} an exit and {told(row, 'error', 3)} came{cosine}."
