"""What eval.grouping found, by rule from its numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import told

HONEST = ("encoder", "length", "online")  # ways that a server could take
SAID = {
    "encoder": "by the encoder's prediction", "length": "by source length", "online": "by a row's recent exits",
    "oracle": "by an answer's true mean depth", "step oracle": "by each row's true next layer",
}  # fmt: skip


def said(summary: Mapping[str, Any]) -> list[str]:
    """For the first row of the table, at its middle batch size and smallest pool under rule own: what grouping saves,
    what bounds it, and whether the timed points agree. Nothing where nothing was counted.
    """
    rows = [row for row in summary["rows"] if row["part"] == "counted" and row["rule"] == "own"]
    if not rows:
        return []
    name = rows[0]["row"]
    rows = [row for row in rows if row["row"] == name]
    batches = sorted({row["batch"] for row in rows})
    batch = batches[len(batches) // 2]
    pool = min(row["pool"] for row in rows if row["pool"] > 1)
    here = {row["grouping"]: row for row in rows if row["batch"] == batch and row["pool"] in (1, pool)}
    top = (
        f"{name}, batch {batch}, pool of {pool} batches: steps in random order run {here['random']['step_layers']:.2f} "
    )
    top += f"of {summary['num_layers']} layers. " + _savings([here[way] for way in HONEST if way in here])
    found = [top, _bound(summary, name, here)]
    timed = [row for row in summary["rows"] if row["part"] == "timed"]
    if timed:
        found.append(_timed(timed))
    return found


def _savings(rows: Sequence[Mapping[str, Any]]) -> str:
    helped = sorted((row for row in rows if row["saved_low"] > 0), key=lambda row: -row["saved"])
    hurt = [row for row in rows if row["saved_high"] < 0]
    same = [row for row in rows if row not in helped and row not in hurt]
    parts = []
    if helped:
        parts.append("; ".join(f"grouping {SAID[row['grouping']]} saves {_saved(row)}" for row in helped))
    if same:
        names = " and ".join(f"{SAID[row['grouping']]} ({_saved(row)})" for row in same)
        parts.append(f"grouping {names} cannot be told from random order")
    if hurt:
        parts.append("; ".join(f"grouping {SAID[row['grouping']]} costs {_saved(row, -1)}" for row in hurt))
    text = ". ".join(part[0].upper() + part[1:] for part in parts)
    best = max(helped, key=lambda row: row["over_random"], default=None)
    if best is None:
        return text + "."
    text += f". Predicted for grouping {SAID[best['grouping']]}: {told(best, 'over_random', 3)} times random order's "
    text += f"tokens/s and {told(best, 'gain', 3)} times full depth's; its price: "
    if best["steps_of_a_token"] > 1:
        return text + f"a running row speaks once in {best['steps_of_a_token']:g} steps."
    return text + f"a request waits until {best['wait_requests']:g} more have come, on average."


def _saved(row: Mapping[str, Any], sign: int = 1) -> str:
    low, high = sorted((sign * row["saved_low"], sign * row["saved_high"]))
    return f"{sign * row['saved']:.2f} [{low:.2f}, {high:.2f}] layers of a step"


def _bound(summary: Mapping[str, Any], name: str, here: Mapping[str, Mapping[str, Any]]) -> str:
    predictors = [row for row in summary["rows"] if row["part"] == "predictor" and row["row"] == name]
    text = "; ".join(f"grouping {SAID[way]} would save {_saved(here[way])}" for way in ("oracle", "step oracle"))
    for row in predictors:
        if row["key"] == "encoder" and row["r2"] is not None and row["rank"] is not None:
            text += f". The encoder tells an answer's mean depth with R² {told(row, 'r2', 3)}, "
            text += f"rank correlation {told(row, 'rank', 3)}; {row['between']:.0%} of the variance of a token's depth "
            text += "lies between answers, the rest inside them, which nothing known of an article tells"
    return text[0].upper() + text[1:] + "."


def _timed(rows: Sequence[Mapping[str, Any]]) -> str:
    off = max(rows, key=lambda row: abs(row["predicted_gain"] / row["gain"] - 1))
    text = f"Of {len(rows)} timed points the prediction is farthest off at {off['rule']} {off['grouping']}, batch "
    text += f"{off['batch']}: {off['predicted_gain']:.2f} predicted, {off['gain']:.2f} timed"
    gained = [_gained(row) for row in rows if row["grouping"] == "encoder"]
    noisy = " (noisy machine)" if any(row["noisy"] for row in rows) else ""
    text += f". Timed tokens/s of grouping by the encoder over random order: {'; '.join(gained)}" if gained else ""
    return f"{text}{noisy}."


def _gained(row: Mapping[str, Any]) -> str:
    rounds = (
        f"{row['over_random']:.3f} (rounds {row['over_random_low']:.3f} to {row['over_random_high']:.3f}, predicted "
    )
    rounds += f"{row['predicted_over_random']:.3f})"
    apart = row["over_random_low"] > 1 or row["over_random_high"] < 1
    return f"{row['rule']} at batch {row['batch']} {rounds}{'' if apart else ', not told apart'}"
