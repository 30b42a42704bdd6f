"""Where the time of a decode goes, and why a ratio of layers is no speed-up.

    python -m eval.breakdown checkpoint=results/debian_tiny/model

A trained folder answers articles to their ends, as many at once as the batch has rows: at full depth, at static depth
of the exits' mean (between two whole depths, interpolated) and with exits at its certified threshold, in turn. The
engine's own clock (serve.accounting) says what each phase took; a step is all of that by the tokens, times the rows of
the batch. What of a layer goes to the keys and values of the source is an estimate: made-up rows with a source of the
articles' mean length and with one of a single token, timed by the engine's bench. If a step shrank as the layers do it
would take full depth's seconds times the mean layer's share; what it takes beyond that is told item by item
(eval/breakdown_parts.py), and the items add up to it. Writes summary.json, rows.parquet and the figure.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.cli import program
from calm.config import RunnerName
from calm.experiment_config import BreakdownConfig

from .common import Stamp, asked_of, finish, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .sessions import FULL, neighbours
from .trials import Ledger, Trial

if TYPE_CHECKING:
    from serve.engine import Engine

    from .timed_folder import Turns
    from .workload import Workload

UNIMPORTANT = ("checkpoint", "batches", "attempts")  # to a batch size's numbers
STATIC = "static"
SHOWN = ("batch", "way", "step_ms", "layer_ratio", "clock_ratio", "layers_ms", "checks_ms", "head_ms", "prefill_ms")
HOW = (
    "a layer over made-up rows whose sources have the articles' mean length, and one token: the difference by the "
    "former, as a share of the layers' time; by the engine's bench, at the batch size"
)


def run(config: BreakdownConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.breakdown", config)
    from .timed_folder import about_timed, clock_name, open_timed

    workload = open_timed(config)
    told = about_timed(workload)
    asked = {name: value for name, value in told.items() if name not in ("checkpoint", "notes")}
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **asked})
    found = ledger.run(list(trials(config, workload)), "breakdown", say)
    rows = keep_rows(found, run_dir)
    say_columns(rows, SHOWN, digits=3)
    summary = {
        **stamp.values(),
        **told,
        "num_layers": workload.num_layers,
        "clock": clock_name(config.threads),
        "cross_attention": HOW,
        "noisy": any(row["noisy"] for row in rows),
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("breakdown", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def trials(config: BreakdownConfig, workload: "Workload") -> Iterator[Trial]:
    for batch in config.batches:
        yield Trial({"batch": batch}, lambda b=batch: broken_down(config, workload, b))  # type: ignore[misc]


def broken_down(config: BreakdownConfig, workload: "Workload", batch: int) -> list[dict[str, Any]]:
    """A record for each way.

    Raises:
        CalmError: the machine is noisy and that is not allowed, or an answer failed.
    """
    from .breakdown_parts import Cost, cost_of, mixed
    from .timed_folder import in_turns

    ways = ways_of(config, workload, batch)
    share = cross_share(ways[FULL].engine, workload, batch, config.repeats)
    timed = in_turns(ways, config)
    costs = {name: cost_of(turns.rounds, batch) for name, turns in ways.items()}
    full, depth = costs[FULL], costs[config.rules[0].value].layers
    around = [FULL if each == workload.num_layers else f"{STATIC} {each}" for each in neighbours(depth)]
    shown: dict[str, Cost] = {FULL: full, STATIC: mixed(costs[around[0]], costs[around[-1]], depth % 1.0)}
    shown |= {rule.value: costs[rule.value] for rule in config.rules}
    rows = []
    for name, cost in shown.items():
        row = told_of(full, cost, share)
        if name in ways:
            row |= of_rounds(config, ways[FULL], ways[name], batch, workload.num_layers)
        rows.append({"way": name, **row, "noisy": timed.noise.noisy, "foreign_cpu": timed.noise.foreign})
    return rows


def ways_of(config: BreakdownConfig, workload: "Workload", batch: int) -> "dict[str, Turns]":
    """Full depth first, then the exits, then the static depths around their mean, which a run of them tells."""
    from calm.config import BatchRule

    from .timed_folder import exit_entry, plain_entry, timed_engine, turns_of

    rules = dict.fromkeys((BatchRule.own, *config.rules))
    engines = {rule: timed_engine(workload, batch, config.threads, rule=rule) for rule in rules}
    ways = {FULL: turns_of(plain_entry(), engines[BatchRule.own], workload)}
    for rule in config.rules:
        ways[rule.value] = turns_of(exit_entry(workload, rule), engines[rule], workload)
    first = ways[config.rules[0].value]
    first(len(workload.articles))
    for depth in neighbours(first.rounds[0].layers):
        if depth < workload.num_layers:
            ways[f"{STATIC} {depth}"] = turns_of(plain_entry(depth), engines[BatchRule.own], workload)
    return ways


def told_of(full: Any, mine: Any, cross: float | None) -> dict[str, Any]:
    """A step in milliseconds by phase, and what of it the layers' share does not explain.

    Returns:
        ``layer_ratio``: layers of full depth by mean layer; ``clock_ratio``: its step's time by this one's;
        ``gap_...``: items of the gap, that add up to ``step_ms - ideal_ms``.
    """
    from .breakdown_parts import gap, ideal, share_of

    layers = mine.seconds["layers"]
    return {
        "step_ms": 1000 * mine.step,
        **{f"{phase}_ms": 1000 * seconds for phase, seconds in mine.seconds.items()},
        "cross_ms": None if cross is None else 1000 * cross * layers,
        "layers": mine.layers,
        "row_layers": mine.row_layers,
        "layer_ratio": 1.0 / share_of(full, mine),
        "clock_ratio": full.step / mine.step,
        "ideal_ms": 1000 * ideal(full, mine),
        **{f"gap_{item}_ms": 1000 * seconds for item, seconds in gap(full, mine).items()},
    }


def of_rounds(config: BreakdownConfig, full: "Turns", mine: "Turns", batch: int, num_layers: int) -> dict[str, Any]:
    """The median of the rounds' clock ratios, the layer ratio's interval over articles, and every round's phases."""
    from calm.metrics import with_median, with_ratio

    from .breakdown_parts import phases

    each, base = ([phases(one, batch) for one in turns.rounds] for turns in (mine, full))
    ratios = [sum(b.values()) / sum(a.values()) for a, b in zip(each, base, strict=True)]
    sums = np.array([sum(answer.emission_layers) for answer in mine.answers])
    tokens = np.array([len(answer.tokens) for answer in mine.answers])
    layers = with_ratio("layers", sums, tokens, config.seed, config.bootstrap)
    return {
        **with_median("clock_ratio", ratios),
        "layer_ratio_low": num_layers / layers["layers_high"],
        "layer_ratio_high": num_layers / layers["layers_low"],
        "steps": mine.rounds[-1].steps,
        "tokens": mine.rounds[-1].session.tokens,
        "rounds": each,
    }


def cross_share(engine: "Engine", workload: "Workload", batch: int, repeats: int) -> float | None:
    """What reading the source's keys and values takes of a layer; None where a layer reads as much of any source."""
    import torch

    from serve.bench import Readings

    if engine.runner_name is not RunnerName.native:
        return None
    lengths = [len(workload.model.to_ids(each.source)) for each in workload.articles]
    seconds: dict[int, list[float]] = {round(statistics.fmean(lengths)): [], 1: []}
    with torch.inference_mode():
        for _ in range(repeats + 1):
            for length, found in seconds.items():
                bench, readings = engine.machine.bench(length), Readings(engine.clock.now)
                try:
                    bench.waves(batch, readings)
                finally:
                    bench.close()
                found.append(readings.medians(warm=0)["layer"][batch])
    long, short = (statistics.median(found[1:]) for found in seconds.values())
    return max(0.0, 1.0 - short / long)


main = program("breakdown", BreakdownConfig, run)

if __name__ == "__main__":
    main()
