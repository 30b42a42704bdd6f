"""The serving run itself, for eval.throughput and eval.latency: measure every cell, write the record, draw."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, ServingConfig
from calm.errors import DataError

from .common import Stamp, finish, plain, say
from .serving_figures import Drawn, draw_figure

if TYPE_CHECKING:
    from .ceilings import Ceilings
    from .serving_result import CellResult
    from .workload import Workload

SHOWN = (
    "batch", "name", "tokens_per_s", "ttft", "tpot", "inner_token_latency", "concurrency", "layers_skipped",
    "decode_over_full", "decode_expected", "decode_over_static", "call_over_full", "share",
)  # fmt: skip


def run_serving(config: ServingConfig, run_dir: Path, drawn: Drawn) -> int:
    """Measure, or read an earlier run's record; draw one of the figures.

    Raises:
        CalmError: the machine is busy and ``allow_noisy`` is not given.
        DataError: ``summary`` is no record of such a run.
    """
    stamp = Stamp(f"eval.{drawn.program}", config)
    if config.summary is not None:
        summary = read_summary(Path(config.summary))
        say(f"read {config.summary}; nothing is measured")
        names = draw_figure(summary, drawn, run_dir)
        finish({**stamp.values(), "read": config.summary, "figures": names}, run_dir)
        return 0
    import torch

    from .clocks import look

    look().check(config.allow_noisy)
    torch.set_num_threads(config.threads)
    from .workload import open_workload

    workload = open_workload(config)
    for line in workload.notes:
        say(f"note: {line}")
    summary = {**stamp.values(), **measured(workload, run_dir)}
    summary["wall_s"] = stamp.values()["wall_s"]
    summary["figures"] = draw_figure(summary, drawn, run_dir)
    say()
    say(as_text(summary))
    say(f"written to {run_dir}")
    finish(summary, run_dir)
    return 0


def measured(workload: "Workload", run_dir: Path) -> dict[str, Any]:
    """All cells; writes ``samples.parquet`` and ``traces.json``, returns the rest as JSON has it."""
    from .ceilings import probe
    from .sessions import at_equal_concurrency

    config = workload.config
    ceilings = probe() if config.probe else None
    if ceilings is not None:
        say(f"this machine: {told_ceilings(ceilings)}")
    results: list[CellResult] = []
    for source in [None] if workload.trained else config.source_tokens:
        for batch in config.batches:
            results.append(one_cell(workload, batch, source))
    if ceilings is not None:
        ceilings = with_packed(ceilings, results, config.dtype)
    cells: list[dict[str, Any]] = []
    for result in results:
        entries = [result.entry(runs, ceilings) for runs in result.cell.runs.values()]
        cells.append(
            {
                "source_tokens": result.cell.source_tokens,
                "batch": result.cell.batch,
                "runner": result.cell.runner,
                "noise": [noise.to_json() for noise in result.noise],
                "entries": entries,
            }
        )
    for source in dict.fromkeys(cell["source_tokens"] for cell in cells):
        at_equal_concurrency([e for cell in cells if cell["source_tokens"] == source for e in cell["entries"]])
    write_samples(run_dir / "samples.parquet", results)
    traces = {name: plain(json.loads(drawn.to_json())) for name, drawn in workload.drawn.items()}
    if traces:
        (run_dir / "traces.json").write_text(json.dumps(traces) + "\n", encoding="utf-8")
    means = {name: {key: drawn[key] for key in ("wanted", "parameter", "seed")} for name, drawn in traces.items()}
    whole: dict[str, Any] = {
        "model": {"name": workload.name, "paper": workload.paper, **workload.about},
        "notes": workload.notes,
        "few": workload.few,
        "many": workload.many,
        "noisy": any(result.noisy for result in results),
        "machine": None if ceilings is None else ceilings.to_json(),
        "traces": means,
        "cells": cells,
        "ratios": [row for result in results for row in result.ratios()],
    }
    found: dict[str, Any] = finite(whole)
    return found


def with_packed(ceilings: "Ceilings", results: "list[CellResult]", dtype: str) -> "Ceilings":
    """With the native runner's own products, where it ran: those of the largest batch."""
    from .ceilings import PRODUCT_ROWS, packed_rates

    native = [result.cell for result in results if result.cell.runner == "native"]
    if not native:
        return ceilings
    cell = max(native, key=lambda each: each.batch)
    rates = packed_rates(cell.engine(BatchRule.own), PRODUCT_ROWS)
    return replace(ceilings, macs={**ceilings.macs, f"{dtype} packed": rates})


def one_cell(workload: "Workload", batch: int, source: int | None) -> "CellResult":
    """Everything of one batch size and source length."""
    from .serving import Cell
    from .serving_result import CellResult

    cell = Cell(workload, batch, source)
    say(f"source {cell.source_tokens}, batch {batch}: {len(cell.runs)} ways of decoding, runner {cell.runner}")
    timed = cell.measure()
    sessions, noise = {name: list(runs.sessions) for name, runs in cell.runs.items()}, [timed.noise]
    if workload.trained:
        sessions, beside = cell.serve()
        noise.append(beside)
    table = cell.cost_table() if workload.config.predict else None
    return CellResult(cell, timed, sessions, noise, table)


def write_samples(path: Path, results: "list[CellResult]") -> None:
    """Every raw reading: of kind ``clock`` (seconds of few and of many tokens) and ``session`` (what users saw)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for result in results:
        where = {"source_tokens": result.cell.source_tokens, "batch": result.cell.batch}
        for name, samples in result.paired.samples.items():
            for number, sample in enumerate(samples):
                seconds = {"few_s": sample.few, "many_s": sample.many}
                rows.append({"kind": "clock", **where, "name": name, "round": number, **seconds})
        for name, sessions in result.sessions.items():
            rows += [
                {"kind": "session", **where, "name": name, "round": number, **vars(each)}
                for number, each in enumerate(sessions)
            ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    pq.write_table(table, path, compression="zstd")


def finite(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(path: Path) -> dict[str, Any]:
    """Raise DataError unless it is the record of a serving run."""
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        summary["cells"], summary["model"], summary["noisy"]  # noqa: B018
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no summary.json of eval.throughput or eval.latency ({error!r})") from None
    return summary


def told_ceilings(ceilings: "Ceilings") -> str:
    """One line of rates."""
    rates = ", ".join(
        f"{name} {rate / 1e9:.0f}" for name in ceilings.macs if (rate := ceilings.fastest(name.split()[0])) is not None
    )
    return (
        f"reads {ceilings.memory / 1e9:.1f} GB/s from memory, {ceilings.cache / 1e9:.1f} from its "
        f"{ceilings.cache_bytes >> 20} MB cache; products in GMAC/s: {rates}; {ceilings.threads} thread(s)"
    )


def as_text(summary: dict[str, Any]) -> str:
    """A table for the terminal: one line for every way of decoding."""
    rows: list[tuple[str, ...]] = [SHOWN]
    for cell in summary["cells"]:
        rows += [tuple(_shown(column, cell, entry) for column in SHOWN) for entry in cell["entries"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(SHOWN))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    lines.append("times in ms; decode_expected: by the cost table; share: of the memory's and of the cache's ceiling")
    return "\n".join(lines)


def _shown(column: str, cell: dict[str, Any], entry: dict[str, Any]) -> str:
    if column == "batch":
        return str(cell["batch"])
    if column == "share":
        ceiling = entry.get("ceiling")
        shares = [] if ceiling is None else [ceiling["share_of_memory"], ceiling["share_of_cache"]]
        return " ".join("-" if share is None else f"{share:.0%}" for share in shares)
    if column == "decode_expected":
        full = next(each for each in cell["entries"] if each["name"] == "full")["decode_predicted_s"]
        own = entry["decode_predicted_s"]
        return f"{full / own:.2f}" if full and own else ""
    value = entry.get(column)
    if column in ("ttft", "tpot", "inner_token_latency"):
        return "" if value is None else f"{1000 * value:.2f}"
    if column == "layers_skipped":
        return f"{value:.1%}"
    return value if isinstance(value, str) else "" if value is None else f"{value:.2f}"
