"""Load a server with completions at fixed rates and see what its users see: any server with ``/v1/completions``.

    python -m serve checkpoint=runs/demo/model                       # or any other server, in another terminal
    python -m eval.serving rates=[1,2,4,8,inf] ways=[full,static=4,tolerance=0.05] goodput.ttft=200
    python -m eval.serving url=http://gpu:8000 prompts=texts.txt max_tokens=64

The load is open: a request is sent when it is due, whether or not earlier ones have ended. Latencies are told from when
a request was due and from when it was sent (eval/load_metrics.py defines all of them, as ``vllm bench serve`` does),
how late the client itself was stands beside, and failures are counted by kind, never mixed in. Writes summary.json,
samples.parquet and a figure. A rate and way that is in the run folder already is not measured again: give the same
``hydra.run.dir=`` to go on. Exit status 5: requests were lost without an answer, or a cell has no completed one.
"""

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.errors import ConfigError
from calm.load_config import LoadConfig, told_rate

from .common import Stamp, finish, say
from .tables import aligned

if TYPE_CHECKING:
    from .load_cells import Cell, Ledger, Measured
    from .load_client import Client
    from .load_prompts import Prompts

UNFINISHED = 5  # exit status
SHOWN = {
    "rate": "rate",
    "way": "way",
    "completed": "done",
    "failed": "failed",
    "lost": "lost",
    "request_throughput": "req/s",
    "output_throughput": "tok/s",
    "from_scheduled.median_ttft_ms": "ttft",
    "from_scheduled.p99_ttft_ms": "p99",
    "median_tpot_ms": "tpot",
    "from_scheduled.median_e2el_ms": "e2el",
    "from_scheduled.p99_e2el_ms": "p99",
    "from_scheduled.request_goodput": "goodput",
    "concurrency": "at once",
    "layers_skipped": "skipped",
    "p99_client_lag_ms": "lag",
}


def run(config: LoadConfig, run_dir: Path) -> int:
    if find_spec("h11") is None:
        raise ConfigError("the load client needs h11, which is not installed; the extra 'serve' brings it")
    from .load_client import check_files
    from .load_figures import draw_figure
    from .load_prompts import read_prompts
    from .load_samples import write_samples

    check_files(max(config.n, config.warmups))
    stamp = Stamp("eval.serving", config)
    prompts = read_prompts(config)
    model, found = asyncio.run(measured(config, prompts, run_dir))
    records = [each.record(config) for each in found]
    write_samples(run_dir / "samples.parquet", [({"way": m.cell.way, "rate": m.cell.rate}, m.samples) for m in found])
    stamped = stamp.values()
    stamped["config"] |= {
        "rates": [told_rate(rate) for rate in config.rates],
        "burstiness": told_rate(config.burstiness),
    }
    summary: dict[str, Any] = {
        **stamped,
        "served_model": model,
        "prompts": prompts.about,
        "client_late": any(record["client_late"] for record in records),
        "lost": sum(record["lost"] for record in records),
        "cells": records,
    }
    summary["figures"] = draw_figure(summary, run_dir)
    say()
    say(as_text(records))
    for record in records:
        for line in warnings(record):
            say(line)
    say(f"written to {run_dir}")
    finish(summary, run_dir)
    return 0 if all(each.whole for each in found) else UNFINISHED


async def measured(config: LoadConfig, prompts: "Prompts", run_dir: Path) -> "tuple[str, list[Measured]]":
    """The model's name, and all cells: those kept in the run folder, and measured now what it lacks.

    Raises:
        NotReady: there is no server, or it does not take what shall be sent.
    """
    from calm.progress import Progress

    from .load_cells import Ledger, bodies, cells
    from .load_client import Client
    from .load_ready import find_model, probe

    sent = prompts.first(config.n)
    client = Client(config.url, config.timeout, prompts.count)
    try:
        model = await find_model(client, config.url, config.served_model, config.ready_timeout)
        say(f"server: {config.url}, model {model}")
        ledger = Ledger(run_dir, config, model, sent)
        order = cells(config.rates, config.ways)
        there = {cell: ledger.read(cell) for cell in order}
        asked = {way: bodies(config, model, way, sent) for way in config.ways}
        for way in config.ways:
            if any(there[cell] is None for cell in order if cell.way == way):
                await probe(client, config.url, way, asked[way][0], config.ready_timeout)
        left = sum(each is None for each in there.values())
        with Progress(left * config.n, "load", unit="request", shown=left > 0) as bar:
            found = [
                there[cell] or await _measure(client, config, cell, asked[cell.way], ledger, bar.update)
                for cell in order
            ]
    finally:
        client.close()
    ways = {way: place for place, way in enumerate(config.ways)}
    return model, sorted(found, key=lambda each: (each.cell.rate, ways[each.cell.way]))


async def _measure(
    client: "Client",
    config: LoadConfig,
    cell: "Cell",
    asked: Sequence[bytes],
    ledger: "Ledger",
    tick: Callable[[], object],
) -> "Measured":
    """A cell, kept where it is whole."""
    from .load_cells import measure

    found = await measure(client, config, cell, asked, tick)
    if found.whole:
        ledger.keep(found)
    say(f"measured: rate {told_rate(cell.rate)}, {cell.way}: {found.duration:.1f} s")
    return found


def warnings(record: dict[str, Any]) -> list[str]:
    """What makes a cell's numbers less than they seem; one line each."""
    where = f"rate {record['rate']}, {record['way']}"
    lines = []
    if record["client_late"]:
        lines.append(
            f"warning: {where}: the client sent up to {record['max_client_lag_ms']:.0f} ms late "
            f"(p99 {record['p99_client_lag_ms']:.0f} ms, above 5 % of the median latency), so these times are partly "
            "its own; give it a core of its own, or lower the rate"
        )
    if record["errors"]:
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(record["errors"].items()))
        sent = record["completed"] + record["failed"]
        lines.append(f"warning: {where}: {record['failed']} of {sent} requests failed: {told}; times are of the others")
    if set(record["tokens_from"]) - {"usage"}:
        lines.append(f"note: {where}: the server told no usage, so tokens were counted here: {record['tokens_from']}")
    return lines


def as_text(records: Sequence[dict[str, Any]]) -> str:
    """A table for the terminal: one line for every rate and way."""
    keys = [key for key in SHOWN if any(_value(record, key) is not None for record in records)]
    rows = [[SHOWN[key] for key in keys], *[[_shown(_value(record, key)) for key in keys] for record in records]]
    lines = aligned(rows)
    lines.append("times in ms, medians and 99th percentiles, from when a request was due; lag: the client's own, p99")
    return "\n".join(lines)


def _value(record: dict[str, Any], key: str) -> Any:
    outer, _, inner = key.rpartition(".")
    return (record[outer] if outer else record).get(inner)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"


main = program("serving", LoadConfig, run)

if __name__ == "__main__":
    main()
