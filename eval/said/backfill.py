"""What eval.backfill found."""

from collections.abc import Mapping
from typing import Any

from .words import listed, number, sign, told

PROJECT, FULL, TRUE = "project", "full", "true"
GAP = "rouge_l_minus_true"


def said(summary: Mapping[str, Any]) -> list[str]:
    """Whether each way of filling loses ROUGE-L against true keys and values, by the paired interval; what it costs."""
    rows = {row["variant"]: row for row in summary["rows"] if row["kind"] == "quality"}
    ways = [name for name in rows if name not in (FULL, TRUE)]
    found = []
    if TRUE in rows and ways:
        found.append(
            f"Beside running the skipped layers after all, {listed([_told(name, rows[name]) for name in ways])}."
        )
    if PROJECT in rows:
        row = rows[PROJECT]
        found.append(
            f"Projecting costs {number(row['fill_of_a_layer'], 1, 100)} % of a layer's products for each layer "
            f"skipped; {number(row['layers'], 2)} of {summary['num_layers']} layers run, with the filling that is "
            f"the work of {number(row['layers_with_fill'], 2)} (counted, not timed)."
        )
    if PROJECT in rows and FULL in rows:
        found.append(
            f"Of the answers {told(rows[PROJECT], 'equal_rows', 1, 100)} % are full depth's word for word; ROUGE-L to "
            f"full depth's answers is {told(rows[PROJECT], 'to_full', 3)}."
        )
    clock = [row for row in summary["rows"] if row["kind"] == "clock"]
    if clock:
        each = [
            f"{number(row['of_true'], 0, 100)} % at batch {row['batch']}"
            for row in clock
            if row["skipped"] == max(other["skipped"] for other in clock)
        ]
        found.append(f"Projecting all layers above the first takes, of the time of running them, {listed(each)}.")
    passes = [row for row in summary["rows"] if row["kind"] == "pass"]
    if passes:
        deepest = max(row["skipped"] for row in passes)
        several = [row for row in passes if row["skipped"] == deepest]
        each = [f"{number(row['of_layers'], 0, 100)} % for {row['positions']} positions" for row in several]
        fill = number(several[-1]["fill_of_pass"], 0, 100)
        found.append(
            f"True keys and values of several positions in one pass at batch 1 take, of running the {deepest} "
            f"layers position by position, {listed(each)}; projecting them one by one takes {fill} % of the last "
            "of these."
        )
    return found


def _told(name: str, row: Mapping[str, Any]) -> str:
    shown = told(row, GAP, 4)
    verdict = {
        -1: f"{name} loses ROUGE-L ({shown})",
        0: f"{name} cannot be told apart ({shown})",
        1: f"{name} gains ROUGE-L ({shown})",
    }
    return verdict[sign(row, GAP)]
