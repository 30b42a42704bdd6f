"""A bench on an engine's machine: made-up rows whose depths are set by hand, and a clock that keeps every reading."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calm.confidence import HEAD_MEASURES
from calm.config import BatchRule, Measure, Schedule
from calm.cost import backfilling, checking
from calm.errors import ConfigError
from calm.models.base import DecoderSpec
from calm.policies import Confident, Full, Policy
from calm.rules import Rule, climb
from calm.thresholds import ThresholdSchedule

from .accounting import Clock
from .exits import MEASURES, Exits
from .extent import Extent
from .heads import HeadState
from .options import RequestOptions
from .requests import Reason, Row, Status
from .wave import EngineWave, Machine

OWN, COMPACT = Rule(BatchRule.own), Rule(BatchRule.compact)


@dataclass
class Tape(Clock):
    """A clock that keeps every reading."""

    heard: list[tuple[str, float]] = field(default_factory=list)

    def __call__(self, phase: str) -> None:
        before = self._last
        super().__call__(phase)
        self.heard.append((phase, self._last - before))

    def spent(self, seconds: Mapping[str, float], rest: str) -> None:
        self.heard += seconds.items()
        super().spent(seconds, rest)

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
        return [(measure, 3 if measure is Measure.agreement else 0) for measure in MEASURES if measure in self.asked]


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


class MadeUp:
    """Rows that nobody asked for, in the slots of an engine's machine.

    Args:
        like: of whose dtype and device a source's K and V are.
        max_source: takes every slot, with a source of so many tokens in it, or as many as a paged cache has room for,
            which the rows then share; None takes none: the rows share the slot that is nobody's.

    Raises:
        ConfigError: a paged cache has no room for a single row.
    """

    def __init__(
        self, spec: DecoderSpec, slots: Any, exits: Exits, tape: Tape, like: Tensor, max_source: int | None
    ) -> None:
        self.slots, self.exits, self.tape = slots, exits, tape
        self.num_layers, self._vocabulary = spec.num_layers, spec.vocab_size
        self._noise = torch.Generator().manual_seed(0)
        self._taken: list[int] = []
        self._source: tuple[Tensor, ...] = ()
        if max_source is not None:
            seats, room = _seats(slots)
            length = min(max_source, room)
            shape = (spec.num_layers, spec.num_kv_heads, length, spec.d_kv)
            self._extent = Extent(length, slots.max_target, (slots.max_target - 1,) * spec.num_layers)
            self._source = (torch.randn(shape, generator=self._noise).to(like),) * 2
            if slots.prompted:
                self._source += (torch.randn(spec.d_model, generator=self._noise).to(like),)
            self._taken = [self._seated() for _ in range(seats)]

    def _seated(self) -> int:
        """A slot with the source in it, and room for any position."""
        slot: int = self.slots.take(self._extent)
        self.slots.put_source(slot, *self._source)
        self.slots.grow(slot, self.slots.max_target - 1)
        return slot

    def close(self) -> None:
        for slot in self._taken:
            self.slots.give_back(slot)
        self._taken.clear()

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self._noise))

    def rows(self, count: int, gathered: bool = False) -> list[Row]:
        """Rows at any of their tokens; in neighbouring slots from 0 on unless ``gathered``."""
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
                next_input=self._draw(self._vocabulary),
                slot=slots[i % len(slots)] if slots else self.slots.padding,
                tokens=[0] * self._draw(self.slots.max_target),
            )
            for i in range(count)
        ]

    def admission(
        self, to_text: Callable[[Sequence[int]], str], sets: Sequence[frozenset[Measure]], readings: Readings
    ) -> None:
        """A row comes, a row goes, a row moves to another slot; the last slot takes part."""
        device, last, slots = self.exits.depths.device, self._taken[-1], self.slots
        policy = next((_confident(measure, slots.max_target) for each in sets for measure in each), Full())
        row = self.rows(slots.count)[-1]
        row.tokens = [row.next_input] * min(8, slots.max_target)

        def end() -> None:
            row.end(Status.finished, Reason.eos)
            self.exits.clear(last)
            slots.give_back(last)
            row.answer(to_text, self.num_layers)

        def admit() -> None:
            self._seated()
            self.exits.put(last, policy, row.id)

        def move() -> None:
            slots.move(last, 0)
            self.exits.move(last, 0)

        readings.timed("end", 1, end, device)
        readings.timed("admit", 1, admit, device)
        if not slots.neighbours:
            readings.add("move", 1, 0.0)  # nobody moves
        elif last:
            slots.give_back(0)
            readings.timed("move", 1, move, device)
            admit()


class Bench(MadeUp):
    """Made-up rows on an eager engine's machine, whose depths are set by hand."""

    def __init__(self, machine: Machine, max_source: int | None = None) -> None:
        spec, slots = machine.runner.spec, machine.runner.slots
        self._asked = _Asked(spec, sorted(machine.checked), slots.count, slots.max_target, machine.exits.depths.device)
        super().__init__(spec, slots, self._asked, Tape(machine.clock.now), slots.keys, max_source)
        self.machine = replace(machine, clock=self.tape, exits=self.exits)

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
        self._asked.asked = frozenset()
        for gathered in (False, True):
            wave = self.wave(OWN, bucket, gathered=gathered)
            began = self.tape.of("start")[0]
            self.tape.begin()
            climb(wave, OWN, self.num_layers, [])
            lowest, *others = self.tape.of("layers")
            layer = sum(others) / len(others) if others else lowest
            readings.add("layer_gathered" if gathered else "layer", bucket, layer)
            if not gathered:
                checks = self.tape.of("checks")
                readings.add(checking(()), bucket, sum(checks) / len(checks))
                readings.add("start", bucket, began + lowest - layer)
                readings.add("head", bucket, self.tape.of("head")[0])
                readings.add("read", bucket, self.tape.of("read")[0])
        if self.num_layers > 1:
            self.packing(bucket, readings)

    def packing(self, bucket: int, readings: Readings) -> None:
        """What rows that leave and join cost; where there is one layer nobody does."""
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
        """Of every number of layers, each at the end of a wave that went no higher: as a step leaves the caches."""
        for depth in range(1, self.num_layers):
            wave = self.wave(OWN, bucket, [depth] * bucket)
            self.tape.begin()
            climb(wave, OWN, self.num_layers, [])
            readings.add(backfilling(self.num_layers - depth), bucket, self.tape.of("backfill")[0])

    def check(self, bucket: int, measures: frozenset[Measure], readings: Readings) -> None:
        """The first check and a later one, with rows of these measures side by side; nobody crosses, so all stay."""
        checked = sorted(self.machine.checked) or [1]
        self._asked.asked = measures
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
            if measures and (not first or len(checked) == 1):
                readings.add(checking(measures), bucket, seconds)
            self.tape.begin()
            wave.leave()
            if not measures:
                readings.add("stay", bucket, self.tape.of("packing")[0])
        if any(measure in HEAD_MEASURES for measure in measures):
            early = torch.ones_like(wave.at.crossed)
            state = HeadState(wave.at.candidates, wave.live)
            speak = partial(self.machine.head.emit, wave.at.hidden, early, state)
            readings.timed("early_head", bucket, speak, self.machine.device)


def _seats(slots: Any) -> tuple[int, int]:
    """Rows that fit at full length, and tokens of source that each may have."""
    seats: int = slots.count
    while True:
        try:
            return seats, slots.longest_source(slots.max_target, seats)
        except ConfigError:
            if seats == 1:
                raise
            seats //= 2


def _confident(measure: Measure, length: int) -> Policy:
    """A policy whose tables a row's admission fills."""
    return Confident(measure, ThresholdSchedule(0.5, kind=Schedule.decaying, length=length))
