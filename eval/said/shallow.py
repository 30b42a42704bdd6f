"""What eval.shallow found."""

from collections.abc import Mapping
from typing import Any

CLOSE = 0.01  # ROUGE-L below full depth that a reader still takes for the same quality


def said(summary: Mapping[str, Any]) -> list[str]:
    """The fastest way of each kind that stays close to full depth; then whether the exits are worth it, by batch."""
    rows = list(summary["rows"])
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        here = [row for row in rows if row["batch"] == batch]
        best = [
            max(close, key=lambda row: row["decode_tokens_ratio"])
            for role in ("exit", "static", "trained shallow")
            if (close := [r for r in here if r["role"] == role and r["rouge_l_minus_full"] >= -CLOSE])
        ]
        told = [
            f"{row['way']} runs at {row['decode_tokens_ratio']:.2f} ({row['rouge_l_minus_full']:+.4f})" for row in best
        ]
        if told:
            found.append(
                f"At batch {batch}, within {CLOSE:g} ROUGE-L of full depth, as multiples of its decode steps by time: "
                f"{'; '.join(told)}."
            )
        else:
            found.append(f"At batch {batch} nothing stays within {CLOSE:g} ROUGE-L of full depth.")
    return [*found, *_worth(summary)]


def _worth(summary: Mapping[str, Any]) -> list[str]:
    """For each exit at its chosen threshold: the fixed depths that are faster and surely not worse, or the reverse."""
    found = []
    pairs = list(summary["pairs"])
    for name, batch in dict.fromkeys((pair["exit"], pair["batch"]) for pair in pairs):
        mine = [pair for pair in pairs if (pair["exit"], pair["batch"]) == (name, batch)]
        beaten_by = [p for p in mine if p["speed_ratio"] < 1 and p["rouge_l_gained_high"] <= 0.0]
        as_good = [
            p for p in mine if p["speed_ratio"] < 1 and p["rouge_l_gained_low"] <= 0.0 < p["rouge_l_gained_high"]
        ]
        if beaten_by:
            worst = min(beaten_by, key=lambda p: p["speed_ratio"])
            found.append(
                f"{name} is not worth it at batch {batch}: {worst['fixed']} is {1 / worst['speed_ratio']:.2f} times as "
                f"fast and better ({-worst['rouge_l_gained']:+.4f} ROUGE-L)."
            )
        elif as_good:
            worst = min(as_good, key=lambda p: p["speed_ratio"])
            found.append(
                f"{name} gains nothing at batch {batch} over {worst['fixed']}, which is {1 / worst['speed_ratio']:.2f} "
                f"times as fast; their ROUGE-L cannot be told apart ({-worst['rouge_l_gained']:+.4f} "
                f"[{-worst['rouge_l_gained_high']:+.4f}, {-worst['rouge_l_gained_low']:+.4f}])."
            )
        else:
            found.append(f"No fixed depth is both faster than {name} at batch {batch} and as good.")
    return found
