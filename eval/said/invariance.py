"""What eval.invariance found, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def said(summary: Mapping[str, Any]) -> list[str]:
    """Three sentences: of the row-exact rules, of the others, and of what those do to the risk.

    Args:
        summary: of eval.invariance; its ``ways``, ``rows``, ``articles`` and ``tolerance``.
    """
    rows: Sequence[Row] = summary["rows"]
    exact, coupled = ([row for row in rows if row["row_exact"] is kind] for kind in (True, False))
    found = [_exact(exact)] if exact else []
    first = [row for row in rows if row["dtype"] == "fp32"] or rows
    way = _way(first[0])
    largest = max(row["batch"] for row in rows if _way(row) == way)
    order = [row["order"] for row in rows if (_way(row), row["batch"]) == (way, largest)][-1]
    shown = [row for row in rows if (_way(row), row["batch"], row["order"]) == (way, largest, order)]
    coupled = [row for row in shown if not row["row_exact"]]
    if not coupled:
        return found
    each = "; ".join(f"{_rule(row, summary['quantile'])} {_percent(row, 'changed')}" for row in coupled)
    found.append(f"Where mates decide, answers change at batch {largest} ({way}): {each}.")
    return [*found, _risk(shown, coupled, summary)]


def _exact(rows: Sequence[Row]) -> str:
    rules, batch = ", ".join(dict.fromkeys(row["rule"] for row in rows)), max(row["batch"] for row in rows)
    parts, quiet = [], []
    for way in dict.fromkeys(map(_way, rows)):
        there = [row for row in rows if _way(row) == way]
        worst = max(there, key=lambda row: row["answers_changed"])
        if not worst["answers_changed"] and not any(row["unexplained"] for row in there):
            quiet.append(way)
            continue
        where = f"{worst['rule']} at batch {worst['batch']}"
        parts.append(f"{way} at most {_percent(worst, 'changed')} ({where}{_excuse(there)})")
    text = f"Row-exact rules ({rules}), batches up to {batch}:"
    if quiet:
        articles, high = rows[0]["articles"], 100 * max(row["changed_high"] for row in rows if _way(row) in quiet)
        parts.insert(0, f"not one of {articles} answers changes in {', '.join(quiet)} (95 %: below {high:.1f} %)")
    return f"{text} {'; '.join(parts)}."


def _excuse(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["unexplained"] is not None]
    if not known:
        return ""
    without = sum(row["unexplained"] for row in known)
    return f"; {without} without a near tie" if without else "; all of them near ties"


def _risk(rows: Sequence[Row], coupled: Sequence[Row], summary: Mapping[str, Any]) -> str:
    tolerance, quantile, batch, way = summary["tolerance"], summary["quantile"], coupled[0]["batch"], _way(coupled[0])
    certified = next(each["certified"] for each in summary["ways"] if each["way"] == way)
    own = next((row for row in rows if row["rule"] == "own"), None)
    alone = "" if own is None else f"own {_percent(own, 'risk')}, {_beside(own, tolerance)}; "
    parts = [
        f"{_rule(row, quantile)} {_percent(row, 'risk')}, {_apart(row)}, {_beside(row, tolerance)}" for row in coupled
    ]
    kind = "certified threshold" if certified else "threshold, which has no certificate in this arithmetic"
    return (
        f"Mean loss of the {kind} at batch {batch} ({way}; tolerance {100 * tolerance:g} %): {alone}{'; '.join(parts)}."
    )


def _apart(row: Row) -> str:
    """By the paired difference, article by article."""
    if row["minus_own_low"] > 0:
        return f"higher than a row's own by {_percent(row, 'minus_own')}"
    if row["minus_own_high"] < 0:
        ends = [-100 * row[f"minus_own{end}"] for end in ("", "_high", "_low")]
        return "lower than a row's own by {:.1f} % [{:.1f}, {:.1f}]".format(*ends)
    return "cannot be told apart from a row's own"


def _beside(row: Row, tolerance: float) -> str:
    if row["risk_low"] > tolerance:
        return "above the tolerance"
    return "below the tolerance" if row["risk_high"] < tolerance else "not told apart from the tolerance"


def _rule(row: Row, quantile: float) -> str:
    return f"quantile {quantile:g}" if row["rule"] == "quantile" else str(row["rule"])


def _way(row: Row) -> str:
    return f"{row['dtype']} {row['runner']}"


def _percent(row: Row, name: str) -> str:
    middle, low, high = (100 * row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{middle:.1f} % [{low:.1f}, {high:.1f}]"
