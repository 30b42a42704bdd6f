"""What eval.skipdecode found."""

from collections.abc import Mapping
from typing import Any

from .words import listed, number, sign, told

CLOSE = 0.01  # ROUGE-L below full depth that a reader still takes for the same quality
NAMES = {"skipdecode": "SkipDecode", "multi_layer_exit": "multi-layer exit", "calm_dec": "CALM-DEC"}
ORDER = {1: "better", -1: "worse", 0: "not told apart"}


def said(summary: Mapping[str, Any]) -> list[str]:
    """Which speed-up in layers each method holds; SkipDecode against each other method; its variants; what is left of
    it where requests come and go; the clock.
    """
    return [*_held(summary), *_order(summary), *_ablation(summary), *_slots(summary), *_clock(summary)]


def _held(summary: Mapping[str, Any]) -> list[str]:
    found = []
    for method, name in NAMES.items():
        mine = [row for row in summary["rows"] if row["method"] == method and row["speedup"] > 1]
        close = [row for row in mine if row["rouge_l_minus_full_low"] >= -CLOSE]
        if close:
            best = min(close, key=lambda row: row["layers"])
            times = number(summary["num_layers"] / best["layers"])
            found.append(f"{name} down to {number(best['layers'])} layers a token ({times} times fewer)")
        elif mine:
            found.append(f"{name} at none of its speed-ups")
    if not found:
        return []
    return [
        f"Within {CLOSE:g} ROUGE-L of full depth's {summary['num_layers']} layers, whole interval over articles, stays "
        f"{'; '.join(found)}. Each is one training."
    ]


def _order(summary: Mapping[str, Any]) -> list[str]:
    found = []
    for other in dict.fromkeys(pair["against"] for pair in summary["pairs"]):
        parts = [
            f"{ORDER[sign(pair, 'rouge_l_gained')]} at {pair['speedup']}x ({told(pair, 'rouge_l_gained', 4)}, "
            f"{number(pair['layers'])} layers against {number(pair['other_layers'])})"
            for pair in summary["pairs"]
            if pair["against"] == other
        ]
        found.append(f"SkipDecode against {NAMES[other]}, by ROUGE-L: {listed(parts)}.")
    return found


def _ablation(summary: Mapping[str, Any]) -> list[str]:
    """Each variant of SkipDecode's schedule against the schedule as it stands."""
    parts = [
        f"{ORDER[sign(row, 'rouge_l_gained')]} with {_schedule(row)} ({told(row, 'rouge_l_gained', 4)}, "
        f"{number(row['layers'])} layers)"
        for row in summary["ablation"][1:]
    ]
    if not parts:
        return []
    first = summary["ablation"][0]
    beside = f"{_schedule(first)} ({number(first['layers'])} layers)"
    return [f"Beside SkipDecode at {summary['variants_of']}x, {beside}, by ROUGE-L: {listed(parts)}."]


def _schedule(row: Mapping[str, Any]) -> str:
    warmup = f"{row['warmup_layers']} warm-up layer" + ("" if row["warmup_layers"] == 1 else "s")
    return f"{row['decay']} decay from {row['max_layers']} to {row['min_layers']} layers, {warmup}"


def _slots(summary: Mapping[str, Any]) -> list[str]:
    """Calls of layers for a token under each way of batching, of SkipDecode."""
    found = []
    for slots in dict.fromkeys(row["slots"] for row in summary["slots"]):
        mine = [row for row in summary["slots"] if row["slots"] == slots and row["tokens"]]
        parts = [
            f"{row['way'].rpartition('-')[2]} {number(row['full_depth'] / row['together'])} begun together, "
            f"{number(row['full_depth'] / row['continuous'])} in continuous batching, "
            f"{number(row['full_depth'] / row['banded'])} with a group for each set of layers"
            for row in mine
            if row["way"].startswith("skipdecode-")
        ]
        if parts:
            found.append(
                f"Calls of layers for a token with {slots} places, those of full depth in continuous batching over "
                f"SkipDecode's (a count, no clock; below 1 there are more of them; the engine takes groups): "
                f"{'; '.join(parts)}."
            )
    return found


def _clock(summary: Mapping[str, Any]) -> list[str]:
    """A ratio of layers beside the time that it took."""
    names = {row["way"]: row for row in summary["rows"]}
    found = []
    for batch in dict.fromkeys(clock["batch"] for clock in summary["clocks"]):
        parts = []
        for method, name in NAMES.items():
            here = [
                clock
                for clock in summary["clocks"]
                if clock["batch"] == batch and names.get(clock["way"], {}).get("method") == method
            ]
            if here:
                best = max(here, key=lambda clock: clock["decode_tokens_ratio"])
                ratio = told(best, "decode_tokens_ratio")
                layers = number(summary["num_layers"] / best["layers"])
                parts.append(f"{name} {ratio} with {layers} times fewer layers")
        if parts:
            found.append(
                f"At batch {batch} in plain eager torch the fastest decode steps, as multiples of full depth's by "
                f"time, are {'; '.join(parts)}."
            )
    return found
