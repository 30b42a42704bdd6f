"""What is said of eval.batching's rows: how far predictions are off, and the paper's own gains."""

import statistics
from collections.abc import Sequence
from typing import Any

from calm.config import BatchRule, Measure
from calm.papers import figure_bars
from calm.rules import ROW_EXACT

from .sessions import FULL

MODELS = ("t5-v1_1-small", "t5-v1_1-base")
PREDICTED = ("tokens_per_s", "decode_tokens_per_s", "latency_s", "tokens_ratio", "decode_tokens_ratio", "latency_ratio")
COUPLED = tuple(rule.value for rule in BatchRule if rule not in ROW_EXACT)


def prediction(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Errors of what was simulated where it was measured too: of ways whose rows are as recorded whatever the batch
    (``row_exact``, with full and static depth), and of those whose mates decide (``coupled``).

    Returns:
        by these two and figure: ``mean`` and ``largest`` of |predicted / measured - 1|, ``way`` and ``batch`` of the
        largest, and how many ``points``.
    """
    table = {(row["batch"], row["way"]): row for row in rows if row["kind"] == "simulated"}
    pairs = [
        (row, table[row["batch"], row["way"]])
        for row in rows
        if row["kind"] == "measured" and (row["batch"], row["way"]) in table
    ]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in ("row_exact", "coupled"):
        mine = [pair for pair in pairs if (pair[0]["way"].split()[0] in COUPLED) == (kind == "coupled")]
        for figure in PREDICTED:
            ratio = figure.endswith("_ratio")  # of full depth to itself there is nothing to foretell
            errors = [
                (abs(foretold[figure] / row[figure] - 1.0), row["way"], row["batch"])
                for row, foretold in mine
                if not (ratio and row["way"] == FULL)
            ]
            if errors:
                worst = max(errors)
                found.setdefault(kind, {})[figure] = {
                    "mean": statistics.fmean(error for error, _, _ in errors),
                    "largest": worst[0], "way": worst[1], "batch": worst[2], "points": len(errors),
                }  # fmt: skip
    return found


def paper_bars(measure: str) -> list[dict[str, Any]]:
    """Gains of this measure over full depth in Figures 1 and 2 of arXiv 2407.20272 (rule ``sync``), a record a model.

    Returns:
        ``tokens_ratio``, ``latency_ratio``, and how many sequences decoded at once by Little's law: ``full_rows`` at
        full depth, ``rows`` with exits. Empty for a measure that it has not.
    """
    found = []
    for model in MODELS:
        bars = figure_bars(model)
        if measure not in bars:
            continue
        full, ours = bars[FULL], bars[measure]
        assert full.tokens_per_s is not None and full.concurrency is not None
        found.append(
            {
                "model": model,
                "measure": Measure(measure).value,
                "tokens_ratio": None if ours.tokens_per_s is None else ours.tokens_per_s / full.tokens_per_s,
                "latency_ratio": ours.inner_token_latency_s / full.inner_token_latency_s,
                "full_rows": full.concurrency,
                "rows": ours.concurrency,
            }
        )
    return found
