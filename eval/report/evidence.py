"""What the experiments measured, in the few shapes that the answer of a report is made from.

Speeds are of measured clocks alone. Where ``eval/said/batching.py`` or ``shallow.py`` has a function ``ways(summary)``,
it gives them, as mappings with the fields of ``Way`` (a number with an interval: a list of the mean and its two ends);
else rows are read that have eval.throughput's columns: ours (exit, static), measure, depth, rule, batch, clock (decode,
call), against (full, own-full) and ratio, with ratio_low and ratio_high where there are any.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from calm.errors import DataError
from calm.metrics import bootstrap_ci

from ..clocks import LIMIT
from .experiments import PACKAGE

EXIT, STATIC, SHALLOW = "exit", "static", "shallow"
EXACT = ("own", "compact", "rebatch", "auto")  # batch rules under which a certificate holds
FULL = ("full", "own-full")
STALE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError)  # a record of another shape


@dataclass(frozen=True)
class Span:
    """A mean and its 95 % interval; without ends where none was measured."""

    at: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, value: Any) -> "Span | None":
        if value is None or isinstance(value, cls):
            return value
        return cls(*map(float, value)) if isinstance(value, Sequence) else cls(float(value))

    @property
    def ends(self) -> tuple[float, float]:
        """Without an interval, what two measurements of the same thing may differ by."""
        if self.low is None or self.high is None:
            return self.at * (1 - LIMIT), self.at * (1 + LIMIT)
        return self.low, self.high

    def beside(self, other: "Span | float") -> int:
        """1 or -1 where this lies wholly above or below the other, 0 where they cannot be told apart."""
        low, high = other.ends if isinstance(other, Span) else (other, other)
        return int(self.ends[0] > high) - int(self.ends[1] < low)


@dataclass(frozen=True)
class Way:
    """A way of decoding, measured beside full depth of the same engine.

    Attributes:
        kind: exit, static (a fixed depth of the same model) or shallow (a model trained with fewer layers).
        name: as tables call it: a measure, ``static depth 4``.
        speed: how many times as fast as full depth a decode step is.
        call: the same of whole calls.
        quality: ROUGE-L minus full depth's, 0 to 1.
        threshold, tolerance: of an exit; without a tolerance it is not certified.
    """

    kind: str
    name: str
    batch: int
    speed: Span
    rule: str | None = None
    call: Span | None = None
    quality: Span | None = None
    threshold: float | None = None
    tolerance: float | None = None
    depth: float | None = None

    @property
    def certified(self) -> bool:
        """For any batch it is decoded in."""
        return self.kind == EXIT and self.tolerance is not None and self.rule in EXACT


@dataclass(frozen=True)
class TableRow:
    """A decoded row of Table 1; ``quality`` as in Way."""

    name: str
    threshold: float | None
    tolerance: float | None
    picked: bool
    skipped: float
    depth: float
    quality: Span | None


@dataclass(frozen=True)
class Evidence:
    """Of all experiments that are there.

    Attributes:
        table: empty where no run of eval.table1 is there.
        largest: the largest part of what is missing from the speed that the skipped layers promise, in words.
        noisy: a machine that did something else was timed.
        suited: the verdict of eval.suitability.
    """

    ways: Sequence[Way] = ()
    table: Sequence[TableRow] = ()
    tolerance: float = 0.05
    largest: str | None = None
    noisy: bool = False
    suited: str | None = None
    unknown: Sequence[str] = field(default=())

    @property
    def batches(self) -> list[int]:
        return sorted({way.batch for way in self.ways if way.kind == EXIT})


def hook(experiment: str, name: str) -> Callable[[Mapping[str, Any]], Any] | None:
    """A function of ``eval/said/<experiment>.py``; None where there is no such module or function."""
    module = f"{PACKAGE}.said.{experiment}"
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None


def gathered(summaries: Mapping[str, Mapping[str, Any]], records: Path | None, unknown: Sequence[str]) -> Evidence:
    """All that the answer is made from; records of another shape count as not there."""
    table = [] if records is None else table_rows(records)
    ways = [way for name in ("batching", "shallow") for way in ways_of(name, summaries.get(name))]
    suited = summaries.get("suitability", {}).get("verdict", {}).get("says")
    by_name, by_depth = {row.name: row for row in table}, {row.depth: row for row in table if row.tolerance is None}
    filled = []
    for way in ways:
        row = by_name.get(way.name) if way.kind == EXIT else by_depth.get(way.depth or -1.0)
        if row is not None and way.kind != SHALLOW:
            exit_only = {"threshold": row.threshold, "tolerance": row.tolerance} if way.kind == EXIT else {}
            empty = {name: value for name, value in exit_only.items() if getattr(way, name) is None}
            way = replace(way, quality=way.quality or row.quality, **empty)  # type: ignore[arg-type]
        filled.append(way)
    tolerances = [each.tolerance for each in (*filled, *table) if each.tolerance is not None]
    return Evidence(
        filled, table, min(tolerances, default=0.05), largest_gap(summaries.get("breakdown")),
        any(is_noisy(each) for each in summaries.values()), suited, unknown,
    )  # fmt: skip


def is_noisy(summary: Mapping[str, Any]) -> bool:
    """Whether it says so, of itself or of a row."""
    rows = summary.get("rows")
    if summary.get("noisy") is True:
        return True
    return isinstance(rows, list) and any(isinstance(row, dict) and row.get("noisy") is True for row in rows)


def ways_of(experiment: str, summary: Mapping[str, Any] | None) -> list[Way]:
    """Measured speeds of an experiment; none where it is missing or its record has another shape."""
    if summary is None:
        return []
    try:
        given = hook(experiment, "ways")
        if given is None:
            return list(_rows_as_ways(summary["rows"]))
        spans = ("speed", "call", "quality")
        return [Way(**{k: Span.of(v) if k in spans else v for k, v in dict(way).items()}) for way in given(summary)]
    except STALE:
        return []


def _rows_as_ways(rows: Sequence[Mapping[str, Any]]) -> Iterator[Way]:
    clocks: dict[tuple[Any, ...], dict[str, Span]] = {}
    about: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        if row.get("against") not in FULL or row.get("ours") not in (EXIT, STATIC) or row.get("ratio") is None:
            continue
        key = (row["ours"], row.get("measure"), row.get("depth"), row.get("rule"), row["batch"], row.get("head"))
        span = Span(row["ratio"], row.get("ratio_low"), row.get("ratio_high"))
        clocks.setdefault(key, {})[str(row.get("clock", "decode"))] = span
        about[key] = row
    for key, spans in clocks.items():
        row, (kind, measure, depth) = about[key], key[:3]
        if "decode" in spans:
            yield Way(
                kind, str(measure) if kind == EXIT else f"static depth {depth:g}", int(row["batch"]), spans["decode"],
                row.get("rule"), spans.get("call"), None, row.get("threshold"), row.get("tolerance"), depth,
            )  # fmt: skip


def largest_gap(summary: Mapping[str, Any] | None) -> str | None:
    """In words, by ``largest(summary)`` of eval/said/breakdown.py, else the first thing that the experiment says."""
    if summary is None:
        return None
    try:
        largest, said = hook("breakdown", "largest"), hook("breakdown", "said")
        if largest is not None:
            return str(largest(summary))
        return None if said is None else next(iter(said(summary)), None)
    except STALE:
        return None


def table_rows(folder: Path) -> list[TableRow]:
    """Decoded rows of a run of eval.table1, each with its paired difference of ROUGE-L to full depth.

    Raises:
        DataError: its records cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from calm.checkpoint import read_json

    path = folder / "records.parquet"
    try:
        rows = read_json(folder / "summary.json")["table1"]
        kept = pq.read_table(path, columns=["id", "row", "rouge_l"]).to_pandas()
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{folder} holds no summary.json and records.parquet of eval.table1 ({error})") from None
    scores = {str(name): part.set_index("id")["rouge_l"] for name, part in kept.groupby("row", sort=False)}
    found = []
    for row in rows:
        if row.get("layers_skipped") is None or row["row"] == "oracle":
            continue
        quality = None
        if {"full", row["row"]} <= scores.keys():
            apart = (scores[row["row"]] - scores["full"]).dropna().to_numpy(dtype=np.float64)
            quality = Span(float(apart.mean()), *bootstrap_ci(apart, seed=0)) if len(apart) else None
        found.append(
            TableRow(row["row"], row.get("threshold"), row.get("tolerance"), bool(row.get("picked")),
                     row["layers_skipped"], row["mean_layers"], quality)
        )  # fmt: skip
    return found
