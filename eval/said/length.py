"""What eval.length found."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import interval, listed, told

LENGTHS = {"source": "source", "output": "answer"}


def said(summary: Mapping[str, Any]) -> list[str]:
    """Layers skipped in the shortest and longest quarter; then what the cost table predicts for whole calls."""
    kept = [row for row in summary["rows"] if row["part"] == "records"]
    found = []
    for by, name in LENGTHS.items():
        compared = _quarters([row for row in kept if row["by"] == by])
        if compared:
            found.append(
                f"Layers skipped from the shortest to the longest quarter by {name}, in %: {listed(compared)}."
            )
    predicted = [row for row in summary["rows"] if row["part"] == "predicted"]
    if predicted:
        found.append(_predicted(predicted))
    return found


def _quarters(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for row in dict.fromkeys(each["row"] for each in rows):
        part = sorted((each for each in rows if each["row"] == row), key=lambda each: each["group"])
        if len(part) < 2:
            continue
        short, long = part[0], part[-1]
        name = "layers_skipped"
        up, down = long[f"{name}_low"] > short[f"{name}_high"], long[f"{name}_high"] < short[f"{name}_low"]
        verdict = "more" if up else "fewer" if down else "cannot be told apart"
        found.append(f"{row} {told(short, name, 1, 100)} and {told(long, name, 1, 100)} ({verdict})")
    return found


def _predicted(rows: Sequence[Mapping[str, Any]]) -> str:
    told_each = []
    for batch in sorted({row["batch"] for row in rows}):
        part = [row for row in rows if row["batch"] == batch]
        least, most = (pick(part, key=lambda row: row["call_ratio"]) for pick in (min, max))
        told_each.append(f"at batch {batch} from {_call(least)} to {_call(most)}")
    return (
        f"Predicted from a cost table measured on shape {rows[0]['shape']}, not timed, a whole call of full depth over "
        f"one with exits: {listed(told_each)}."
    )


def _call(row: Mapping[str, Any]) -> str:
    ratio = interval(row["call_ratio"], row.get("call_ratio_low"), row.get("call_ratio_high"))
    return f"{ratio} ({row['source']:g} source and {row['tokens']:g} answer tokens)"
