"""What every experiment of trials leaves: its rows as Parquet, its figure as PNG and PDF."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calm.errors import CalmError

from .common import can_draw, say
from .tables import aligned
from .trials import Found, Row

UNFINISHED = 5  # exit status: a trial failed


def keep_rows(found: Found, run_dir: Path) -> list[Row]:
    """Write ``rows.parquet``; the rows of the trials that are done.

    Raises:
        CalmError: every trial failed.
    """
    import pandas as pd

    if not found.rows:
        raise CalmError("; ".join(f"{name}: {why}" for name, why in found.failed.items()))
    pd.DataFrame(found.rows).to_parquet(run_dir / "rows.parquet", compression="zstd")
    return found.rows


def draw(experiment: str, summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Names of the files of the figure; none where there is nothing to draw, or matplotlib is not installed.

    Args:
        experiment: of calm.report_plots.
        summary: what its figure is drawn from.
    """
    if not can_draw():
        return []
    from calm.report_plots import draw_panels, panels_of

    shown = panels_of(experiment, summary)
    if not shown:
        return []
    figure = draw_panels(shown)[0].figure
    figure.savefig(run_dir / f"{experiment}.png", dpi=150)
    figure.savefig(run_dir / f"{experiment}.pdf", metadata={"CreationDate": None})
    return [f"{experiment}.png", f"{experiment}.pdf"]


def say_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], digits: int, left: int = 1) -> None:
    """A table for the terminal; what a row has not is empty."""

    def shown(value: Any) -> str:
        return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    say("\n".join(aligned([columns, *([shown(row.get(name)) for name in columns] for row in rows)], left=left)))
