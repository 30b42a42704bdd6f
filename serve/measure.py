"""Measures a cost table on the machine that an engine runs on: its own waves, over rows that nobody asked for.

By the engine's own clock. Entries are measured in turns, one repeat of each after another, so that a slow moment of
the machine falls on all of them; each entry is the median of its repeats. The first round warms up and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from calm.config import BatchRule, Measure
from calm.cost import CostTable
from calm.environment import environment
from calm.errors import ConfigError
from calm.sim_rows import Setting

from .bench import Readings
from .exits import MEASURES
from .prefill import cross_bytes
from .wave import Spoken

if TYPE_CHECKING:
    from .engine import Engine


def setting_of(engine: Engine) -> Setting:
    """What a simulation needs to know of an engine."""
    options, most = engine.options, engine.cross_cache.max_bytes
    return Setting(
        num_layers=engine.model.spec.num_layers,
        buckets=engine.machine.buckets,
        packed=engine.slots.neighbours,
        padded_calls=engine.prefill.padded_calls,
        one_piece=engine.machine.one_piece,
        prompted=engine.slots.prompted,
        overlaps=engine.machine.overlap,
        checked=frozenset(engine.model.exit_layers),
        max_source=engine.model.max_source,
        prefill_rows=options.prefill_rows,
        prefill_calls=options.prefill_calls,
        source_multiple=options.source_multiple,
        cross_cache_rows=options.cross_cache_rows,
        cross_cache_tokens=None if most is None else most // cross_bytes(engine.model.spec),
    )


@torch.inference_mode()
def measure(
    engine: Engine,
    repeats: int = 5,
    measures: Iterable[Iterable[Measure]] | None = None,
    lengths: Sequence[int] | None = None,
) -> CostTable:
    """The cost table of an idle engine; its slots are free and its exits clean afterwards.

    Args:
        repeats: that count.
        measures: sets of measures that rows may have at once; None: each one by itself that the model can serve.
        lengths: of the sources: each one's encoding is measured, and layers over one of their mean length (where that
            matters: the native runner's); None: the longest that the model takes.

    Raises:
        ConfigError: the engine has work; ``repeats`` is below 1.
    """
    if engine.has_work:
        raise ConfigError("a cost table is measured on an idle engine; this one has requests")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    if measures is None:
        measures = [{m} for m in MEASURES if m is not Measure.classifier or engine.model.classifier is not None]
    sets = [frozenset(each) for each in measures]
    encoded = {engine.prefill.padded(length) for length in (lengths or [engine.model.max_source])}
    typical = round(sum(lengths) / len(lengths)) if lengths else engine.model.max_source
    bench = engine.machine.bench(typical)
    readings = Readings(engine.clock.now)
    try:
        for _ in range(repeats + 1):
            for bucket in engine.machine.measured:
                bench.waves(bucket, readings)
                bench.backfills(bucket, readings)
                for asked in (frozenset[Measure](), *sets):
                    bench.check(bucket, asked, readings)
            for length in sorted(encoded):
                _encode(engine, length, readings)
            bench.admission(engine.model.to_text, sets, readings)
            _host(engine, bench, readings)
    finally:
        bench.close()
    seconds = _host_split(readings.medians(), engine.options.ladder)
    return CostTable(between(seconds, engine.machine.buckets), repeats, environment())


@torch.inference_mode()
def measure_check(machine: Any, measures: frozenset[Measure], repeats: int = 5) -> dict[str, dict[int, float]]:
    """Entries of one more set of measures; the engine may be in the middle of its work, nobody's slot is touched.

    What it takes of a step is the phase ``measuring``: no part of decoding.
    """
    machine.clock("schedule")
    bench, readings = machine.bench(), Readings(machine.clock.now)
    try:
        for _ in range(repeats + 1):
            for bucket in machine.measured:
                bench.check(bucket, measures, readings)
    finally:
        bench.close()
    machine.clock("measuring")
    return between(readings.medians(), machine.buckets)


def between(seconds: dict[str, dict[int, float]], buckets: Sequence[int]) -> dict[str, dict[int, float]]:
    """With the buckets that lie between two measured ones, on a straight line, for what was measured by bucket."""
    filled = {}
    for name, known in seconds.items():
        filled[name] = dict(known)
        if name == "encode":  # by padded length
            continue
        for low, high in pairwise(sorted(known)):
            for size in [bucket for bucket in buckets if low < bucket < high]:
                share = (size - low) / (high - low)
                filled[name][size] = known[low] + share * (known[high] - known[low])
        filled[name] = dict(sorted(filled[name].items()))
    return filled


def _encode(engine: Engine, length: int, readings: Readings) -> None:
    sources = [[engine.model.spec.eos_token_id] * length] * engine.options.prefill_rows
    readings.timed("encode", length, lambda: engine.prefill(sources), engine.model.device)


def _host(engine: Engine, bench: Any, readings: Readings) -> None:
    """At the smallest and the largest bucket, on rows that run for as long as that takes."""
    for count in sorted({engine.options.ladder[0], engine.options.ladder[-1]}):
        engine._running = bench.rows(count)
        for place, row in enumerate(engine._running):  # as if each had a slot of its own, and nobody had to move
            row.slot = place
        try:
            readings.timed("host", count, partial(_silent_step, engine, bench, count), engine.model.device)
        finally:
            engine._running = []


def _silent_step(engine: Engine, bench: Any, count: int) -> None:
    """What the host does for a step in which so many rows speak and none ends."""
    rows = engine._running
    bench.tape.begin()
    layers = [bench.num_layers] * count
    tokens = [row.next_input for row in rows]
    engine._take(Spoken(rows, tokens, layers, layers, layers, [False] * count, _nothing, _nothing, None))
    engine._answers()
    bench.tape.end(count, count, BatchRule.own, 0, 0, 0)


def _nothing() -> torch.Tensor:
    raise AssertionError("greedy rows look at no logits")


def _host_split(seconds: dict[str, dict[int, float]], ladder: Sequence[int]) -> dict[str, dict[int, float]]:
    """What the host does by step and by row."""
    host = seconds.pop("host")
    few, many = ladder[0], ladder[-1]
    row = max(0.0, (host[many] - host[few]) / (many - few)) if many > few else host[few] / few
    step = max(0.0, host[few] - row * few)
    return {**seconds, "row": {1: row}, "step": {1: step}}
