"""Table 1 as text, Markdown and CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from .tables import aligned, markdown

Values = dict[str, Any]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _number(digits: int) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def _threshold(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"{min(value):.3f}..{max(value):.3f}"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def _rouge(row: Values) -> str:
    return f"{row['rouge_l']:.4f} [{row['rouge_l_low']:.4f}, {row['rouge_l_high']:.4f}]"


def _tolerance(row: Values) -> str:
    return "" if row["tolerance"] is None else f"{row['consistency']} {row['tolerance']:g}"


def _paper(name: str, shown: Callable[[Any], str]) -> Callable[[Values], str]:
    return lambda row: shown((row["paper"] or {}).get(name))


COLUMNS: dict[str, Callable[[Values], str]] = {
    "row": lambda row: row["row"] + (" *" if row["picked"] else ""),
    "threshold": lambda row: _threshold(row["threshold"]),
    "at t=0": lambda row: _threshold(row["threshold_first"]),
    "at t=N": lambda row: _threshold(row["threshold_last"]),
    "tolerance": _tolerance,
    "ROUGE-L [95 %]": _rouge,
    "to full": lambda row: _number(4)(row["rouge_l_to_full"]),
    "skipped": lambda row: _share(row["layers_skipped"]),
    "layers": lambda row: _number(2)(row["mean_layers"]),
    "executed": lambda row: _number(2)(row["executed_mean"]),
}
PAPER_COLUMNS: dict[str, Callable[[Values], str]] = {
    "paper ROUGE-L": _paper("rouge_l", _number(4)),
    "paper to full": _paper("rouge_l_to_full", _number(4)),
    "paper skipped": _paper("layers_skipped", _share),
    "paper layers": _paper("mean_layers", _number(2)),
}


def cells(table: Sequence[Values]) -> list[list[str]]:
    """Header and rows as shown; the paper's columns where a paper has any of these rows."""
    columns = {**COLUMNS, **(PAPER_COLUMNS if any(row["paper"] for row in table) else {})}
    return [list(columns), *([shown(row) for shown in columns.values()] for row in table)]


def as_text(table: Sequence[Values]) -> str:
    """Aligned columns, numbers to the right."""
    shown = aligned(cells(table), left=1)
    rule = "-" * len(shown[0])
    return "\n".join([rule, shown[0], rule, *shown[1:], rule])


def as_markdown(table: Sequence[Values]) -> str:
    lines = cells(table)
    return markdown(lines, ["---", *["---:"] * (len(lines[0]) - 1)])


def as_csv(table: Sequence[Values]) -> str:
    """Every flat value at full precision, one line a row."""
    skip = ("paper", "exit_histogram")
    names = [name for name in table[0] if name not in skip]
    papers = sorted({f"paper_{key}" for row in table for key in row["paper"] or {}})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *papers])
    for row in table:
        paper = row["paper"] or {}
        writer.writerow([*(row[name] for name in names), *(paper.get(name.removeprefix("paper_")) for name in papers)])
    return out.getvalue()
