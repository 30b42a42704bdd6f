"""What eval.thresholds found."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import sign
from .words import told as interval_of

Row = Mapping[str, Any]


def said(summary: Mapping[str, Any]) -> list[str]:
    """Three sentences about the middle tolerance: certified points; schedules and heads; random splits."""
    rows = summary["rows"]
    tolerances = sorted(summary["tolerances"])
    tolerance = tolerances[len(tolerances) // 2]
    certified = {_curve(row): row for row in rows if row["kind"] == "certified" and row["tolerance"] == tolerance}
    own: dict[str, Row] = {}
    for row in certified.values():
        own.setdefault(row["measure"], row)
    apart = [row for row in rows if row["kind"] == "difference" and row["tolerance"] == tolerance]
    full = next(row for row in rows if row["kind"] == "full")
    halves = [row for row in rows if row["kind"] == "splits" and _curve(row) in map(_curve, own.values())]
    return [
        _measures(list(own.values()), apart, full, tolerance, summary),
        *_variants(apart, tolerance),
        _splits(halves, summary),
    ]


def _measures(own: Sequence[Row], apart: Sequence[Row], full: Row, tolerance: float, summary: Row) -> str:
    """Who skips most, whether that can be told, and what the static depths between which it lies are worth."""
    points = [
        f"{row['measure']} skips {_percent(row, 'layers_skipped')} of the layers at ROUGE-L "
        f"{interval_of(row, 'rouge_l', 4)}"
        if row["index"] > 0
        else f"{row['measure']} skips nothing (only full depth is certified)"
        for row in own
    ]
    articles = summary["articles"]
    said = (
        f"Certified for tolerance {tolerance:g} on {articles['calibration']} articles (each measure by itself, error "
        f"probability {summary['error_prob']:g}), over {articles['test']} others: {'; '.join(points)}; full depth has "
        f"{interval_of(full, 'rouge_l', 4)}."
    )
    skipping = [row for row in own if row["index"] > 0]
    if not skipping:
        return said
    best = max(skipping, key=lambda row: float(row["layers_skipped"]))
    ties = []
    for row in own:
        pair = _pair(apart, best["measure"], row["measure"])
        if pair is not None and not sign(pair, "layers_skipped"):
            ties.append(row["measure"])
    if len(own) > 1 and ties:
        said += f" {best['measure']} skips most, but cannot be told apart from {' and '.join(ties)}."
    elif len(own) > 1:
        said += f" {best['measure']} skips most, and more than each of the others."
    return said + _beside_static(skipping, apart)


def _beside_static(skipping: Sequence[Row], apart: Sequence[Row]) -> str:
    """Quality beside as many layers without any confidence."""
    beside = {row["measure"]: row for row in apart if row["of"] == "static"}
    told = [
        f"{row['measure']} {_signed(beside[row['measure']], 'rouge_l', 1, 4)}, "
        f"{_verdict(beside[row['measure']], 'rouge_l', 'better', 'worse')}"
        for row in skipping
        if row["measure"] in beside
    ]
    return f" ROUGE-L less that of the static depths of the same mean depth: {'; '.join(told)}." if told else ""


def _variants(apart: Sequence[Row], tolerance: float) -> list[str]:
    """Another schedule or head beside the measure's own, each at its own certified threshold."""
    told = []
    for row in apart:
        if row["of"] not in ("schedule", "head"):
            continue
        name = f"{row['schedule']} less {row['other_schedule']}"
        if row["of"] == "head":
            name = f"{row['head']} head less {row['other_head']} head"
        told.append(
            f"{row['measure']}, {name}: {_signed(row, 'layers_skipped', 100, 1)} points of layers skipped, "
            f"{_verdict(row, 'layers_skipped', 'more', 'fewer')}, and {_signed(row, 'rouge_l', 1, 4)} ROUGE-L, "
            f"{_verdict(row, 'rouge_l', 'better', 'worse')}"
        )
    if not told:
        return []
    return [
        f"At tolerance {tolerance:g}, each at its own certified threshold (the steps of their grids are part of the "
        f"difference): {'; '.join(told)}."
    ]


def _splits(rows: Sequence[Row], summary: Row) -> str:
    """How often the other half lost no more than the tolerance, and where that was no feat."""
    told = []
    for row in rows:
        alone = row["splits"] - row["below_one"]
        trivial = f" ({alone} certified full depth alone, which loses nothing)" if alone else ""
        told.append(f"{row['measure']} at {row['tolerance']:g}: {row['held']} of {row['splits']}{trivial}")
    wanted = 1 - summary["error_prob"]
    short = [row for row in rows if row["held"] < wanted * row["splits"]]
    verdict = f"all at least {100 * wanted:g} %" if not short else f"{len(short)} of these below {100 * wanted:g} %"
    return (
        f"One random half certified and the other lost no more than the tolerance: {'; '.join(told)}; {verdict}. "
        "The splits overlap, and a half only estimates the mean that a certificate speaks of: an illustration, no test."
    )


def _verdict(row: Row, name: str, above: str, below: str) -> str:
    """Of a difference, by whether its interval leaves 0 out."""
    if not sign(row, name):
        return "cannot be told apart"
    return above if row[name] > 0 else below


def _curve(row: Row) -> tuple[str, str, str]:
    return row["measure"], row["schedule"], row["head"]


def _pair(apart: Sequence[Row], one: str, other: str) -> Row | None:
    """The difference between two measures; None of one and itself."""
    names = {one, other} if one != other else set[str]()
    return next(
        (row for row in apart if row["of"] == "measure" and {row["measure"], row["other_measure"]} == names), None
    )


def _percent(row: Row, name: str) -> str:
    middle, low, high = (100 * row[name + end] for end in ("", "_low", "_high"))
    return f"{middle:.1f} % [{low:.1f}, {high:.1f}]"


def _signed(row: Row, name: str, scale: float, digits: int) -> str:
    middle, low, high = (scale * row[name + end] for end in ("", "_low", "_high"))
    return f"{middle:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
