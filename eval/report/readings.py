"""Records of experiments as evidence. A record that is missing or has another shape gives none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calm.errors import DataError
from calm.metrics import bootstrap_ci

from ..said.shallow import faster
from ..said.words import sign
from .evidence import EXIT, SHALLOW, STALE, STATIC, Quality, Span, Way
from .experiments import PACKAGE

FULL = "full"
FIXED = {"static": (STATIC, "static depth {:g}"), "trained": (SHALLOW, "a model of {:g} layers")}  # by role in a record
Summary = Mapping[str, Any]
Piece = TypeVar("Piece")


def hook(experiment: str, name: str) -> Any:
    """A function of ``eval/said/<experiment>.py``; None where there is no such module or function."""
    module = f"{PACKAGE}.said.{experiment}"
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None


def is_noisy(summary: Summary) -> bool:
    """Whether it says so, of itself or of a row."""
    rows = summary.get("rows")
    if summary.get("noisy") is True:
        return True
    return isinstance(rows, list) and any(isinstance(row, dict) and row.get("noisy") is True for row in rows)


def read(rows: Callable[[Summary], Iterator[Piece]], summary: Summary | None) -> list[Piece]:
    """None of a summary that is missing or has another shape."""
    if summary is None:
        return []
    try:
        return list(rows(summary))
    except STALE:
        return []


def timed_ways(summary: Summary | None) -> list[Way]:
    """Of eval.batching: what was measured, not simulated; the interpolated fixed depth is left out."""
    return read(_timed, summary)


def _timed(summary: Summary) -> Iterator[Way]:
    measure = str(summary["measure"])
    at = summary["thresholds"][measure]
    for row in summary["rows"]:
        if row["kind"] != "measured" or row["role"] not in (EXIT, STATIC):
            continue
        speed, call = Span.of(row, "decode_tokens_ratio"), Span.of(row, "tokens_ratio")
        if row["role"] == EXIT:
            yield Way(
                EXIT, measure, row["batch"], speed, row["way"], call, threshold=at["threshold"],
                tolerance=at["certified_for"],
            )  # fmt: skip
        else:
            depth = float(row["way"].split()[-1])
            yield Way(STATIC, f"static depth {depth:g}", row["batch"], speed, call=call, depth=depth)


def shallow_ways(summary: Summary | None) -> list[Way]:
    """Of eval.shallow: fixed depths, models trained with fewer layers, and exits at their chosen thresholds."""
    return read(_beside, summary)


def _beside(summary: Summary) -> Iterator[Way]:
    for row in summary["rows"]:
        speed, call = Span.of(row, "decode_tokens_ratio"), Span.of(row, "tokens_ratio")
        quality, batch, depth = Span.of(row, "rouge_l_minus_full"), row["batch"], row["depth"]
        if row["role"] in FIXED and depth < summary["num_layers"]:
            kind, name = FIXED[row["role"]]
            yield Way(kind, name.format(depth), batch, speed, call=call, quality=quality, depth=depth)
        elif row["role"] == EXIT and row["marked"]:
            ahead = {
                FIXED[pair["role"]][1].format(pair["depth"]): (sign(pair, "rouge_l_gained"), faster(pair))
                for pair in summary["pairs"]
                if (pair["exit"], pair["batch"]) == (row["way"], batch)
            }
            yield Way(
                EXIT, row["measure"], batch, speed, row["rule"], call, quality, threshold=row["threshold"],
                tolerance=row["tolerance"], ahead=ahead,
            )  # fmt: skip


def thresholds_qualities(summary: Summary | None) -> list[Quality]:
    """Of eval.thresholds: certified points of the full head and static depths, over test articles."""
    return read(_points, summary)


def _points(summary: Summary) -> Iterator[Quality]:
    for row in summary["rows"]:
        if row["kind"] == "certified" and row["head"] == FULL:
            yield Quality(
                EXIT, row["measure"], Span.of(row, "rouge_l_minus_full"), row["layers_skipped"], row["threshold"],
                row["tolerance"],
            )  # fmt: skip
        elif row["kind"] == STATIC:
            depth, span = float(row["layer"]), Span.of(row, "rouge_l_minus_full")
            yield Quality(STATIC, f"static depth {depth:g}", span, row["layers_skipped"], depth=depth)


def table_qualities(folder: Path) -> list[Quality]:
    """Decoded rows of a run of eval.table1, each with its paired difference of ROUGE-L to full depth.

    Raises:
        DataError: its records cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from calm.checkpoint import read_json
    from calm.errors import CalmError

    try:
        rows = read_json(folder / "summary.json")["table1"]
        kept = pq.read_table(folder / "records.parquet", columns=["id", "row", "rouge_l"]).to_pandas()
        scores = {str(name): part.set_index("id")["rouge_l"] for name, part in kept.groupby("row", sort=False)}
        return list(_table(rows, scores))
    except (OSError, pa.ArrowException, CalmError, *STALE) as error:
        raise DataError(f"{folder} holds no summary.json and records.parquet of eval.table1 ({error})") from None


def _table(rows: Sequence[Summary], scores: Mapping[str, Any]) -> Iterator[Quality]:
    for row in rows:
        name = row["row"]
        if row["layers_skipped"] is None or name in (FULL, "oracle"):
            continue
        span = None
        if {FULL, name} <= scores.keys():
            apart = (scores[name] - scores[FULL]).dropna().to_numpy(dtype=np.float64)
            span = Span(float(apart.mean()), *bootstrap_ci(apart, seed=0)) if len(apart) else None
        kind = STATIC if name.startswith(STATIC) else EXIT
        yield Quality(
            kind, name, span, row["layers_skipped"], row["threshold"], row["tolerance"], row["mean_layers"],
            bool(row["picked"]),
        )  # fmt: skip
