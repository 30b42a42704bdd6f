"""What eval.slowest_row found."""

from collections.abc import Mapping
from typing import Any

from .words import listed, number, told

OWN, SYNC = "own", "sync"
COMMON = 32  # a batch that many serve; the nearest measured one is told


def said(summary: Mapping[str, Any]) -> list[str]:
    """Layers under sync and under each row's own crossing at a common batch; whether hard mates make a difference."""
    layers = summary["num_layers"]
    plain = [row for row in summary["rows"] if row["hard_share"] is None and not row["decoded"]]
    names = list(dict.fromkeys(row["row"] for row in plain))
    batch = min({row["batch"] for row in plain}, key=lambda each: (abs(each - COMMON), each), default=0)
    by = {(row["row"], row["rule"]): row for row in plain if row["batch"] == batch}
    both = [name for name in names if {(name, OWN), (name, SYNC)} <= by.keys()]
    found = []
    if both:
        told_each = [
            f"{name} {told(by[name, SYNC], 'layers')} instead of {told(by[name, OWN], 'layers')}" for name in both
        ]
        found.append(
            f"In batches of {batch} whose rows wait for the slowest one (sync), a token runs, of {layers} layers: "
            f"{listed(told_each)}."
        )
        waste = [_lost(name, by[name, OWN], by[name, SYNC], layers) for name in both]
        found.append(f"Of the layers that could be skipped, waiting takes {listed(waste)}.")
        early = [f"{name} {told(by[name, SYNC], 'stops_early', 0, 100)} %" for name in both]
        found.append(f"Tokens whose step ends below the last layer, at batch {batch} under sync: {listed(early)}.")
    found += _decoded([row for row in summary["rows"] if row["decoded"]])
    mixed = [row for row in summary["rows"] if row["hard_share"] is not None and row["rule"] == SYNC]
    if mixed:
        found.append(_mixtures(mixed))
    return found


def _lost(name: str, own: Mapping[str, Any], sync: Mapping[str, Any], layers: int) -> str:
    skipped = layers - own["layers"]
    return f"{number((sync['layers'] - own['layers']) / skipped, 0, 100)} % of {name}'s" if skipped > 0 else (
        f"none of {name}'s, which skips nothing"
    )  # fmt: skip


def _decoded(rows: list[Any]) -> list[str]:
    """Under each rule where rows wait, at the largest batch that was decoded."""
    if not rows:
        return []
    batch = max(row["batch"] for row in rows)
    here = [row for row in rows if row["batch"] == batch]
    each = [
        f"{name} {listed([_under(row) for row in here if row['row'] == name])}"
        for name in dict.fromkeys(row["row"] for row in here)
    ]
    return [f"Decoded in batches of {batch}, a token runs: {'; '.join(each)} layers."]


def _under(row: Mapping[str, Any]) -> str:
    return f"{told(row, 'layers')} under {row['rule']}"


def _mixtures(mixed: list[Any]) -> str:
    batch = max(row["batch"] for row in mixed)
    told_each = []
    for name in dict.fromkeys(row["row"] for row in mixed):
        part = sorted(
            (row for row in mixed if row["row"] == name and row["batch"] == batch), key=lambda row: row["hard_share"]
        )
        if len(part) < 2:
            continue
        easy, hard = part[0], part[-1]
        apart = hard["layers_low"] > easy["layers_high"] or hard["layers_high"] < easy["layers_low"]
        verdict = f"{told(easy, 'layers')} and {told(hard, 'layers')}" + (
            "" if apart else ", which cannot be told apart"
        )
        told_each.append(f"{name} {verdict}")
    if not told_each:
        return f"At batch {batch} no two mixtures of easy and hard articles were drawn."
    return f"Batches of {batch} of the easiest and of the hardest mixture run under sync: {listed(told_each)} layers."
