"""What eval.shallow found."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import listed, shown_threshold, sign, told

Row = Mapping[str, Any]
POINTS = 100.0  # ROUGE-L is told in points of a hundred


def said(summary: Row) -> list[str]:
    """For each measure at its chosen threshold, at the smallest and the largest batch: which fixed depths beat it and
    which it beats. A fixed depth beats it where it is clearly faster and not clearly worse, or clearly better and not
    clearly slower; the reverse likewise."""
    found = []
    for name in dict.fromkeys(pair["exit"] for pair in summary["pairs"]):
        mine = [pair for pair in summary["pairs"] if pair["exit"] == name]
        sizes = dict.fromkeys(end(pair["batch"] for pair in mine) for end in (min, max))
        found.append(" ".join(_against(summary["rows"], [p for p in mine if p["batch"] == size]) for size in sizes))
    if any(row["role"] == "trained" for row in summary["rows"]):
        found.append("Of each training there is one: intervals are over articles and rounds, not over trainings.")
    return found


def _against(rows: Sequence[Row], pairs: Sequence[Row]) -> str:
    first = pairs[0]
    own = next(row for row in rows if (row["way"], row["batch"]) == (first["exit"], first["batch"]))
    wins = {verdict: [pair for pair in pairs if verdict_of(pair) == verdict] for verdict in (1, 0, -1)}
    certified = "" if first["tolerance"] is None else f", certified for risk {first['tolerance']:g},"
    text = (
        f"{first['measure']} at {shown_threshold(first['threshold'])}{certified} decodes at batch {first['batch']} "
        f"{told(own, 'decode_tokens_ratio')} times full depth's tokens a second at {_points(own)}"
    )
    parts = []
    if wins[-1]:
        best = max(wins[-1], key=lambda pair: -pair["decode_tokens_ratio"])
        parts.append(f"it is beaten by {_names(wins[-1])}, of which the fastest is {_apart(best)}")
    if wins[1]:
        parts.append(f"it beats {_names(wins[1])}")
    if not parts:
        parts.append("beside every fixed depth one is faster and the other better, or nothing can be told")
    return f"{text}; {'; '.join(parts)}."


def verdict_of(pair: Row) -> int:
    """1 where the exit is clearly ahead in speed or quality and not clearly behind in the other; -1 the reverse."""
    quality = sign(pair, "rouge_l_gained")
    speed = faster(pair)
    if quality * speed < 0:
        return 0
    return (quality + speed > 0) - (quality + speed < 0)


def faster(pair: Row) -> int:
    """1 or -1 where the exit is clearly the faster or the slower of a pair, else 0."""
    return int(pair["decode_tokens_ratio_low"] > 1.0) - int(pair["decode_tokens_ratio_high"] < 1.0)


def _names(pairs: Sequence[Row]) -> str:
    by: dict[str, list[str]] = {}
    for pair in pairs:
        by.setdefault(pair["role"], []).append(f"{pair['depth']:g}")
    words = {"static": "static depth", "trained": "the model trained with"}
    return listed([f"{words[role]} {listed(depths)}" for role, depths in by.items()])


def _apart(pair: Row) -> str:
    """Speed of the fixed depth over the exit's, and what it gains in quality."""
    middle, low, high = (pair[f"decode_tokens_ratio{end}"] for end in ("", "_high", "_low"))
    speed = {"at": 1 / middle, "at_low": 1 / low, "at_high": 1 / high}
    gained = {
        "at": -pair["rouge_l_gained"], "at_low": -pair["rouge_l_gained_high"], "at_high": -pair["rouge_l_gained_low"]
    }  # fmt: skip
    return (
        f"{_names([pair])}: {told(speed, 'at')} times as fast, {told(gained, 'at', 1, POINTS)} points of ROUGE-L more"
    )


def _points(row: Row) -> str:
    return f"{told(row, 'rouge_l_minus_full', 1, POINTS)} points of ROUGE-L to full depth"
