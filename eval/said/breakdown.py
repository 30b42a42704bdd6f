"""What eval.breakdown found."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import BUSY, told

ITEMS = {  # of the gap, in words
    "waiting": "layers run while waiting for the slowest row",
    "smaller batches": "batches that have grown small",
    "checks": "the checks",
    "head": "the head",
    "backfill": "backfill",
    "encoder": "the encoder",
    "packing": "packing and calls",
    "host": "the host",
}
WAYS = ("own", "compact")
NAMED = 3  # items of a gap that are told


def said(summary: Mapping[str, Any]) -> list[str]:
    """For the smallest and the largest batch: layer ratio, clock ratio, and the largest items between them."""
    rows: Sequence[Mapping[str, Any]] = summary["rows"]
    sizes = sorted({row["batch"] for row in rows})
    found = []
    for batch in dict.fromkeys((sizes[0], sizes[-1])) if sizes else ():
        at = {row["way"]: row for row in rows if row["batch"] == batch}
        exits = [at[way] for way in WAYS if way in at]
        if exits:
            found.append(_batch(batch, at["full"], max(exits, key=lambda row: float(row["clock_ratio"])), at["static"]))
    return [*found, *([BUSY] if summary["noisy"] else [])]


def _batch(batch: int, full: Mapping[str, Any], best: Mapping[str, Any], static: Mapping[str, Any]) -> str:
    gap = {item: best[f"gap_{item}_ms"] for item in ITEMS}
    whole = best["step_ms"] - best["ideal_ms"]
    low, high = best["clock_ratio_low"], best["clock_ratio_high"]
    verdict = "faster than" if low > 1.0 else "slower than" if high < 1.0 else "not to be told from"
    text = (
        f"At batch {batch} full depth runs {told(best, 'layer_ratio')} times the layers of a token that leaves early, "
        f"but takes {told(best, 'clock_ratio')} times the time of {best['way']}, which is {verdict} full "
        f"depth (static depth of the same mean: {static['clock_ratio']:.2f})"
    )
    if whole <= 0.0:
        return f"{text}; a step takes no more than the layers' share of full depth's."
    largest = sorted((item for item in gap if gap[item] > 0.0), key=lambda item: -gap[item])[:NAMED]
    shares = ", ".join(f"{ITEMS[item]} {100 * gap[item] / full['step_ms']:.0f} %" for item in largest)
    return (
        f"{text}; what a step takes beyond the layers' share is {100 * whole / full['step_ms']:.0f} % of full depth's "
        f"step; its largest parts: {shares}."
    )
