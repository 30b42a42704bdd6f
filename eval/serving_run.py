"""The serving run itself, for eval.throughput and eval.latency: measure every cell, write the record, draw."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import RunnerName
from calm.engine_config import ServingConfig
from calm.errors import CalmError, DataError

from .common import Stamp, asked_of, finish, plain, say
from .serving_figures import Drawn, draw_figure
from .tables import aligned

if TYPE_CHECKING:
    from .ceilings import Ceilings
    from .serving_result import CellResult
    from .workload import Workload

UNFINISHED = 5  # exit status: cells were refused for noise or could not be measured
SHOWN = (
    "batch", "name", "tokens_per_s", "ttft", "tpot", "inner_token_latency", "concurrency", "layers_skipped",
    "rouge_l", "decode_over_full", "decode_expected", "decode_over_static", "call_over_full", "share",
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
    if not summary["cells"]:
        raise CalmError("; ".join(f"{name}: {reason}" for name, reason in summary["missing"].items()))
    summary["wall_s"] = stamp.values()["wall_s"]
    summary["figures"] = draw_figure(summary, drawn, run_dir)
    say()
    say(as_text(summary))
    for name, reason in summary["missing"].items():
        say(f"{name}: not measured: {reason}")
    say(f"written to {run_dir}")
    finish(summary, run_dir)
    return UNFINISHED if summary["missing"] else 0


def measured(workload: "Workload", run_dir: Path) -> dict[str, Any]:
    """All cells, those of the ledger and those that it lacks; writes ``samples.parquet`` and ``traces.json``.

    A cell that could not be measured is told under ``missing``, with the reason.
    """
    from .sessions import at_equal_concurrency

    config, missing = workload.config, dict[str, str]()
    ledger = run_dir / "cells" / ledger_name(workload)
    ceilings = _ceilings(workload, ledger)
    if ceilings is not None:
        say(f"this machine: {told_ceilings(ceilings)}")
    records = []
    for source in [None] if workload.trained else config.source_tokens:
        for batch in config.batches:
            record = _kept(workload, batch, source, ledger, ceilings, missing)
            records += [] if record is None else [record]
    for source in dict.fromkeys(record["source_tokens"] for record in records):
        at_equal_concurrency([e for r in records if r["source_tokens"] == source for e in r["entries"]])
    write_samples(run_dir / "samples.parquet", records)
    traces = {name: plain(json.loads(drawn.to_json())) for name, drawn in workload.all_traces().items()}
    if traces:
        (run_dir / "traces.json").write_text(json.dumps(traces) + "\n", encoding="utf-8")
    means = {name: {key: drawn[key] for key in ("wanted", "parameter", "seed")} for name, drawn in traces.items()}
    return {
        "model": {"name": workload.name, "paper": workload.paper, **workload.about},
        "notes": workload.notes,
        "few": workload.few,
        "many": workload.many,
        "noisy": any(record["noisy"] for record in records),
        "missing": missing,
        "machine": None if ceilings is None else ceilings.to_json(),
        "traces": means,
        "cells": [{name: value for name, value in r.items() if name not in ("samples", "ratios")} for r in records],
        "ratios": [row for record in records for row in record["ratios"]],
    }


# what does not change a cell's measurement: which others there are, and how long one tries
UNIMPORTANT = ("batches", "source_tokens", "attempts", "allow_noisy", "summary", "checkpoint")


def ledger_name(workload: "Workload") -> str:
    """Another one where anything is asked that changes what is measured, or another model is."""
    from calm.calibration.identity import hash_json

    identity = workload.model.identity
    asked = asked_of(workload.config, UNIMPORTANT)
    # random sources and traces are drawn for the longest and the largest of all
    asked |= {"longest": max(workload.config.source_tokens), "largest": max(workload.config.batches)}
    model = workload.about if identity is None else {**workload.about, "checkpoint": identity.model}
    return f"{workload.name}-{hash_json({'asked': asked, 'model': plain(model)})[:12]}"


def _ceilings(workload: "Workload", ledger: Path) -> "Ceilings | None":
    """Of this machine, with the native runner's own products where it runs; probed once for a ledger."""
    from calm.checkpoint import read_json, write_json

    from .ceilings import PRODUCT_ROWS, Ceilings, packed_rates, probe

    if not workload.config.probe:
        return None
    path = ledger / "machine.json"
    if path.is_file():
        return Ceilings.from_json(read_json(path))
    found = probe(device=str(workload.model.device))
    engine = workload.engine(max(workload.config.batches))
    if engine.runner_name is RunnerName.native:
        rates = packed_rates(engine, PRODUCT_ROWS)
        found = replace(found, macs={**found.macs, f"{workload.config.dtype} packed": rates})
    ledger.mkdir(parents=True, exist_ok=True)
    write_json(path, found.to_json())
    return found


def _kept(
    workload: "Workload",
    batch: int,
    source: int | None,
    ledger: Path,
    ceilings: "Ceilings | None",
    missing: dict[str, str],
) -> dict[str, Any] | None:
    """A cell's record: that of the ledger, or a new one; None where it could not be measured."""
    from calm.checkpoint import finite, read_json, write_json

    name = f"{'articles' if source is None else f's{source}'}-b{batch}"
    path = ledger / f"{name}.json"
    if not path.is_file():
        try:
            record = finite(one_cell(workload, batch, source).record(ceilings))
        except CalmError as error:
            say(f"{name}: not measured: {error}")
            missing[name] = str(error)
            return None
        ledger.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    found: dict[str, Any] = read_json(path)
    return found


def one_cell(workload: "Workload", batch: int, source: int | None) -> "CellResult":
    """Everything of one batch size and source length."""
    from .serving_cells import Cell
    from .serving_result import CellResult

    cell = Cell(workload, batch, source)
    say(f"source {cell.source_tokens}, batch {batch}: {len(cell.runs)} ways of decoding, runner {cell.runner}")
    timed = cell.measure()
    sessions, noise = {name: list(runs.sessions) for name, runs in cell.runs.items()}, [timed.noise]
    if workload.trained:
        sessions, beside = cell.serve()
        noise.append(beside)
    heads = dict.fromkeys(runs.entry.head for runs in cell.runs.values()) if workload.config.predict else ()
    return CellResult(cell, timed, sessions, noise, {head: cell.cost_table(head) for head in heads})


def write_samples(path: Path, records: list[dict[str, Any]]) -> None:
    """Every raw reading: of kind ``clock`` (seconds of few and of many tokens) and ``session`` (what users saw)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row for record in records for row in record["samples"]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    pq.write_table(table, path, compression="zstd")


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
    lines = aligned(rows)
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
