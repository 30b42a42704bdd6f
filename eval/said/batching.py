"""What eval.batching found."""

from collections.abc import Mapping, Sequence
from typing import Any

from calm.rules import ROW_EXACT

from .words import BUSY, told

EXACT = tuple(rule.value for rule in ROW_EXACT)
PAPERS = "sync"
Row = Mapping[str, Any]


def said(summary: Mapping[str, Any]) -> list[str]:
    """The fastest rule that keeps a row's tokens, at the largest batch; the paper's rule over all batch sizes, beside
    the paper's gains; how good the predictions are. Ranges are those of the rounds."""
    measured = [row for row in summary["rows"] if row["kind"] == "measured"]
    sizes = sorted({row["batch"] for row in measured})
    found = [_fastest(measured, sizes[-1])] if sizes else []
    found += _papers_rule(measured, summary["paper"])
    found += _prediction(summary["prediction"])
    return [*filter(None, found), *([BUSY] if summary["noisy"] else [])]


def against_one(row: Row, name: str = "tokens_ratio") -> str:
    """``above``, ``below``, or ``level`` where the range of the rounds holds 1."""
    return "above" if row[f"{name}_low"] > 1.0 else "below" if row[f"{name}_high"] < 1.0 else "level"


def _fastest(measured: Sequence[Row], batch: int) -> str:
    at = {row["way"]: row for row in measured if row["batch"] == batch}
    rules = sorted((at[way] for way in EXACT if way in at), key=lambda row: -row["tokens_ratio"])
    if not rules:
        return ""
    best = rules[0]
    level = [row["way"] for row in rules[1:] if row["tokens_ratio_high"] >= best["tokens_ratio_low"]]
    names = ", ".join([best["way"], *level]) + (" cannot be told apart as the fastest" if level else " is fastest")
    full = {"above": "faster than", "below": "slower than", "level": "not to be told from"}[against_one(best)]
    text = (
        f"Of the rules that keep a row's tokens {names} at batch {batch}: {told(best, 'tokens_ratio')} of full "
        f"depth's tokens a second, encoder included, which is {full} full depth"
    )
    if "static" not in at:
        return text + "."
    static = at["static"]
    apart = static["tokens_ratio_low"] > best["tokens_ratio_high"]
    behind = static["tokens_ratio_high"] < best["tokens_ratio_low"]
    word = "faster still" if apart else "slower" if behind else "not to be told from it"
    return f"{text}; static depth of the same mean is {word} ({told(static, 'tokens_ratio')})."


def _papers_rule(measured: Sequence[Row], paper: Sequence[Row]) -> list[str]:
    rows = sorted((row for row in measured if row["way"] == PAPERS), key=lambda row: row["batch"])
    if not rows:
        return []
    parts = []
    for where, word in (("above", "faster than full depth"), ("level", "not to be told from it"), ("below", "slower")):
        batches = [str(row["batch"]) for row in rows if against_one(row) == where]
        parts += [f"{word} at batch {', '.join(batches)}"] if batches else []
    last = rows[-1]
    theirs = ", ".join(
        f"{bar['tokens_ratio']:.2f} and {bar['latency_ratio']:.2f} ({bar['model']}, {bar['full_rows']:.0f} sequences "
        f"at once at full depth and {bar['rows']:.0f} with exits)"
        for bar in paper
        if bar["tokens_ratio"] is not None
    )
    return [
        f"sync, the paper's rule, is {'; '.join(parts)}; at batch {last['batch']} it gives "
        f"{told(last, 'tokens_ratio')} of full depth's tokens a second and takes {told(last, 'latency_ratio')} of its "
        "time between tokens"
        f"{f'; the paper says {theirs}' if theirs else ''}."
    ]


def _prediction(found: Mapping[str, Any]) -> list[str]:
    parts = []
    for kind, what in (
        ("row_exact", "for static depth and the rules that keep a row's tokens"),
        ("coupled", "for the rules under which mates decide, whose depths are taken as a row has them alone"),
    ):
        error = found.get(kind, {}).get("tokens_ratio")
        if error:
            parts.append(
                f"{100 * error['mean']:.0f} % {what} (largest {100 * error['largest']:.0f} %: {error['way']} at batch "
                f"{error['batch']})"
            )
    return (
        [f"Tokens a second over full depth by the cost tables are off by {', and by '.join(parts)} on average."]
        if parts
        else []
    )
