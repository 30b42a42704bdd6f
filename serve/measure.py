"""Measures a cost table on the machine that an engine runs on: its own waves, over rows that nobody asked for.

By the engine's own clock. Entries are measured in turns, one repeat of each after another, so that a slow moment of
the machine falls on all of them; each entry is the median of its repeats. The first round warms up and does not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from calm.config import BatchRule, Measure, Schedule
from calm.cost import CostTable, backfilling, checking
from calm.environment import environment
from calm.errors import ConfigError
from calm.policies import Confident, Full, Policy
from calm.rules import Rule, climb
from calm.simulate import Setting
from calm.thresholds import ThresholdSchedule

from .accounting import Clock
from .exits import MEASURES, Exits
from .options import RequestOptions
from .requests import Reason, Row, Status
from .wave import EngineWave, Machine, Spoken

if TYPE_CHECKING:
    from .engine import Engine

OWN, COMPACT = Rule(BatchRule.own), Rule(BatchRule.compact)


@dataclass
class Tape(Clock):
    """A clock that keeps every reading."""

    heard: list[tuple[str, float]] = field(default_factory=list)

    def __call__(self, phase: str) -> None:
        before = self._last
        super().__call__(phase)
        self.heard.append((phase, self._last - before))

    def begin(self) -> None:
        self.heard = []
        super().begin()

    def of(self, phase: str) -> list[float]:
        return [seconds for name, seconds in self.heard if name == phase]


class _Asked(Exits):
    """Exits where the measures that are present are said, not counted."""

    asked: frozenset[Measure] = frozenset()

    @property
    def present(self) -> list[tuple[Measure, int]]:
        return [(measure, 3) for measure in MEASURES if measure in self.asked]


class Readings:
    """Repeats of every entry."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._all: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, name: str, size: int, seconds: float) -> None:
        self._all[name][size].append(seconds)

    def timed(self, name: str, size: int, run: Callable[[], object], device: torch.device) -> None:
        began = self._now()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.add(name, size, self._now() - began)

    def medians(self, warm: int = 1) -> dict[str, dict[int, float]]:
        """Without the first ``warm`` repeats."""
        return {
            name: {size: max(0.0, statistics.median(seconds[warm:])) for size, seconds in sorted(sizes.items())}
            for name, sizes in self._all.items()
        }


def setting_of(engine: Engine) -> Setting:
    """What a simulation needs to know of an engine."""
    options = engine.options
    return Setting(
        num_layers=engine.model.spec.num_layers,
        buckets=options.ladder,
        checked=frozenset(engine.model.exit_layers),
        max_source=engine.model.max_source,
        prefill_rows=options.prefill_rows,
        prefill_calls=options.prefill_calls,
        source_multiple=options.source_multiple,
        cross_cache_rows=options.cross_cache_rows,
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
        lengths: of sources whose encoding is measured; None: the longest one.

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
    bench = Bench(engine.machine, engine.model.max_source)
    readings = Readings(engine.clock.now)
    try:
        for _ in range(repeats + 1):
            for bucket in engine.options.ladder:
                bench.exits.asked = frozenset()
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
    return CostTable(_host_split(readings.medians(), engine.options.ladder), repeats, environment())


@torch.inference_mode()
def measure_check(machine: Machine, measures: frozenset[Measure], repeats: int = 5) -> dict[str, dict[int, float]]:
    """Entries of one more set of measures; the engine may be in the middle of its work, nobody's slot is touched."""
    bench, readings = Bench(machine), Readings(machine.clock.now)
    for _ in range(repeats + 1):
        for bucket in machine.buckets:
            bench.check(bucket, measures, readings)
    return readings.medians()


class Bench:
    """Made-up rows on an engine's machine, whose depths are set by hand.

    Args:
        max_source: takes every slot, with a source of so many tokens in it; None takes none: the rows share the
            slot that is nobody's.
    """

    def __init__(self, machine: Machine, max_source: int | None = None) -> None:
        self.tape = Tape(machine.clock.now)
        self.slots = machine.runner.slots
        spec = machine.runner.spec
        self.exits = _Asked(
            spec, sorted(machine.checked), self.slots.count, self.slots.max_target, machine.exits.depths.device
        )
        self.machine = replace(machine, clock=self.tape, exits=self.exits)
        self.num_layers, self._vocabulary = spec.num_layers, spec.vocab_size
        self._noise = torch.Generator().manual_seed(0)
        self._taken: list[int] = []
        if max_source is not None:
            shape = (spec.num_layers, spec.num_heads, max_source, spec.d_kv)
            like = self.slots.cross_keys
            self._source = (torch.randn(shape, generator=self._noise).to(like),) * 2
            for _ in range(self.slots.count):
                self._taken.append(self.slots.take())
                self.slots.put_source(self._taken[-1], *self._source)

    def close(self) -> None:
        for slot in self._taken:
            self.slots.give_back(slot)
        self._taken.clear()

    def rows(self, count: int, gathered: bool = False) -> list[Row]:
        """Rows at their first token; in neighbouring slots from 0 on unless ``gathered``."""
        slots = self._taken[::-1] if gathered else self._taken
        return [
            Row(
                id=f"measured-{i}",
                number=i,
                source=(0,),
                options=RequestOptions(ignore_eos=True),
                policy=Full(),
                certified=False,
                limit=1 << 30,
                next_input=int(torch.randint(self._vocabulary, (), generator=self._noise)),
                slot=slots[i] if slots else self.slots.padding,
            )
            for i in range(count)
        ]

    def wave(self, rule: Rule, count: int, depths: Sequence[int] | None = None, gathered: bool = False) -> EngineWave:
        """A wave at layer 0 on a tape that has just begun; ``depths`` default to L."""
        rows = self.rows(count, gathered)
        self.tape.begin()
        wave = EngineWave(self.machine, rule, rows)
        wave.prefix = wave.prefix and not gathered  # one slot is always its own neighbour
        padding = wave.at.depths.shape[0] - count
        wave.at.depths = torch.tensor([*(depths or [self.num_layers] * count)] + [0] * padding).to(wave.at.depths)
        return wave

    def waves(self, bucket: int, readings: Readings) -> None:
        """Whole waves: all to the top in place and gathered, and under ``compact`` in two parts and in many."""
        for gathered in (False, True):
            wave = self.wave(OWN, bucket, gathered=gathered)
            began = self.tape.of("start")[0]
            self.tape.begin()
            climb(wave, OWN, self.num_layers, [])
            layers = self.tape.of("layers")
            readings.add("layer_gathered" if gathered else "layer", bucket, sum(layers) / len(layers))
            if not gathered:
                readings.add("start", bucket, began)
                readings.add("head", bucket, self.tape.of("head")[0])
                readings.add("read", bucket, self.tape.of("read")[0])
        first = self.packed(bucket, 2)
        readings.add("pack", bucket, first[0])
        parts = min(bucket, self.num_layers)
        if parts == 1:
            readings.add("merge", bucket, 0.0)
            readings.add("part", bucket, first[-1])
            return
        many = self.packed(bucket, parts)
        part = (many[-1] - first[-1]) / (parts - 2) if parts > 2 else first[-1] / 2
        readings.add("part", bucket, part)
        readings.add("merge", bucket, first[-1] - 2 * part)
        if bucket > 1:
            self.joined(bucket, readings)

    def packed(self, rows: int, parts: int) -> list[float]:
        """Seconds of packing of a wave that ``compact`` takes up in so many parts; the last brings them together."""
        depths = [1 + i * parts // rows for i in range(rows)]
        deepest = max(depths)
        wave = self.wave(COMPACT, rows, [self.num_layers if depth == deepest else depth for depth in depths])
        self.tape.begin()
        if rows == 1:  # it can leave only with nobody staying behind
            wave.run(1)
            wave.check(1)
            wave._put_aside([0])
            wave._keep([0])
            self.machine.clock("packing")
            wave.rows = []
            wave.speak()
        else:
            climb(wave, COMPACT, self.num_layers, [])
        return self.tape.of("packing")

    def joined(self, bucket: int, readings: Readings) -> None:
        both = [self.wave(OWN, count) for count in (bucket // 2, bucket - bucket // 2)]
        for wave in both:
            wave.run(1)
            wave.check(1)
        readings.timed("join", bucket, lambda: both[0].join(both[1]), self.machine.device)

    def backfills(self, bucket: int, readings: Readings) -> None:
        at = self.wave(OWN, bucket).at
        runner = self.machine.runner
        for layers in range(1, self.num_layers):
            above = self.num_layers - layers
            written = torch.full_like(at.crossing, above)
            fill = partial(runner.backfill, at.hidden, at.slots, at.steps, written, above)
            readings.timed(backfilling(layers), bucket, fill, self.machine.device)

    def check(self, bucket: int, measures: frozenset[Measure], readings: Readings) -> None:
        """The first check and a later one, with rows of these measures side by side; nobody crosses."""
        checked = sorted(self.machine.checked) or [1]
        self.exits.asked = measures
        wave = self.wave(COMPACT, bucket)
        wave.at.depths.zero_()
        wave.at.thresholds = torch.full_like(wave.at.thresholds, float("inf"))
        which = [MEASURES.index(measure) for measure in measures] or [-1]
        wave.at.measures = torch.tensor([which[i % len(which)] for i in range(bucket)]).to(wave.at.measures)
        for layer, first in zip(checked[:2], (True, False), strict=False):
            wave.run(layer)
            self.tape.begin()
            wave.check(layer)
            seconds = self.tape.of("checks")[0]
            if first and measures:
                readings.add(checking(measures, first=True), bucket, seconds)
            if not first or len(checked) == 1 or not measures:
                readings.add(checking(measures), bucket, seconds)
            self.tape.begin()
            wave.leave()
            if not measures:
                readings.add("stay", bucket, self.tape.of("packing")[0])

    def admission(
        self, to_text: Callable[[Sequence[int]], str], sets: Sequence[frozenset[Measure]], readings: Readings
    ) -> None:
        """A row comes, a row goes, a row moves to another slot; the last slot takes part."""
        device, last, slots = self.machine.device, self._taken[-1], self.slots
        policy = next((_confident(measure, slots.max_target) for each in sets for measure in each), Full())
        row = self.rows(self.slots.count)[-1]
        row.tokens = [row.next_input] * min(8, slots.max_target)

        def end() -> None:
            row.end(Status.finished, Reason.eos)
            self.exits.clear(last)
            slots.give_back(last)
            row.answer(to_text, self.num_layers)

        def admit() -> None:
            slots.put_source(slots.take(), *self._source)
            self.exits.put(last, policy, row.id)

        def move() -> None:
            slots.move(last, 0)
            self.exits.move(last, 0)

        readings.timed("end", 1, end, device)
        readings.timed("admit", 1, admit, device)
        if last:
            slots.give_back(0)
            readings.timed("move", 1, move, device)
            admit()

    def host(self, engine: Engine, count: int) -> None:
        """What the host does for a step in which so many rows speak and none ends."""
        rows = engine._running
        self.tape.begin()
        layers = [self.num_layers] * count
        tokens, hidden = [row.next_input for row in rows], torch.empty(0, 0)  # greedy: nobody looks at it
        engine._take(Spoken(rows, tokens, layers, layers, layers, [False] * count, hidden, None))
        engine._answers()
        self.tape.end(count, count, BatchRule.own, 0, 0, 0)


def _confident(measure: Measure, length: int) -> Policy:
    return Confident(measure, ThresholdSchedule(0.5, kind=Schedule.decaying, length=length))


def _encode(engine: Engine, length: int, readings: Readings) -> None:
    sources = [[engine.model.spec.eos_token_id] * length] * engine.options.prefill_rows
    readings.timed("encode", length, lambda: engine.prefill(sources), engine.model.device)


def _host(engine: Engine, bench: Bench, readings: Readings) -> None:
    """At the smallest and the largest bucket, on rows that run for as long as that takes."""
    for count in sorted({engine.options.ladder[0], engine.options.ladder[-1]}):
        engine._running = bench.rows(count)
        try:
            readings.timed("host", count, partial(bench.host, engine, count), engine.model.device)
        finally:
            engine._running = []


def _host_split(seconds: dict[str, dict[int, float]], ladder: Sequence[int]) -> dict[str, dict[int, float]]:
    """What the host does by step and by row."""
    host = seconds.pop("host")
    few, many = ladder[0], ladder[-1]
    row = max(0.0, (host[many] - host[few]) / (many - few)) if many > few else host[few] / few
    step = max(0.0, host[few] - row * few)
    return {**seconds, "row": {1: row}, "step": {1: step}}
