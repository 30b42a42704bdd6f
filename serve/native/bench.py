"""What serve.measure times on a native engine: whole waves, read by the step's own clock."""

from collections.abc import Sequence

import torch

from calm.confidence import HEAD_MEASURES
from calm.config import BatchRule, Measure
from calm.cost import backfilling, checking
from calm.rules import Rule

from ..bench import MadeUp, Readings, Tape
from ..exits import MEASURES
from .machine import NativeMachine
from .wave import NativeWave

OWN, COMPACT = Rule(BatchRule.own), Rule(BatchRule.compact)


class NativeBench(MadeUp):
    """Made-up rows on a native engine's machine, whose depths are set by hand."""

    def __init__(self, machine: NativeMachine, max_source: int | None = None) -> None:
        tape = Tape(machine.clock.now)
        super().__init__(machine.spec, machine.slots, machine.exits, tape, torch.empty(0), max_source)
        self.machine, self._clock, machine.clock = machine, machine.clock, tape

    def close(self) -> None:
        self.machine.clock = self._clock
        for slot in self._taken or [self.slots.padding]:
            self.exits.clear(slot)
        super().close()

    def wave(self, count: int, depth: int, measures: Sequence[Measure] = (), least: float = 2.0) -> NativeWave:
        """Rows at layer 0 that leave at ``depth``, or where it is 0 once a confidence reaches ``least``."""
        rows = self.rows(count)
        for number, row in enumerate(rows):
            self.exits.depths[row.slot] = depth
            self.exits.thresholds[row.slot] = least
            self.exits.measures[row.slot] = MEASURES.index(measures[number % len(measures)]) if measures else -1
            self.exits.run_lengths[row.slot] = 3
        self.tape.begin()
        return NativeWave(self.machine, rows)

    def waves(self, bucket: int, readings: Readings) -> None:
        """All rows to the top. Nothing is packed or gathered, so who leaves and who joins costs nothing."""
        wave = self.wave(bucket, self.num_layers)
        began = self.tape.of("start")[0]
        self.tape.begin()
        wave.climb(OWN, [])
        layer = sum(self.tape.of("layers")) / self.num_layers
        for name in ("layer", "layer_gathered"):
            readings.add(name, bucket, layer)
        readings.add(checking(()), bucket, sum(self.tape.of("checks")) / self.num_layers)
        readings.add("start", bucket, began + sum(self.tape.of("packing")))
        readings.add("head", bucket, sum(self.tape.of("head")))
        readings.add("read", bucket, sum(self.tape.of("read")))
        for name in ("pack", "merge", "part", "stay"):
            readings.add(name, bucket, 0.0)
        self.joined(bucket, readings)

    def joined(self, bucket: int, readings: Readings) -> None:
        """What it takes to stop, take other rows in and go on, or to park rows and come back: the host's own."""
        if bucket == 1 or self.num_layers == 1 or not self._taken:
            readings.add("join", bucket, 0.0)
            readings.add("resume", bucket, 0.0)
            return
        rows = self.rows(bucket)
        both = [NativeWave(self.machine, part) for part in (rows[: bucket // 2], rows[bucket // 2 :])]
        for wave in both:
            wave.pause(COMPACT, 1)
        self.tape.begin()
        both[0].join(both[1])
        both[0].pause(COMPACT, 2)
        readings.add("join", bucket, sum(self.tape.of("packing")))
        self.tape.begin()
        parked = both[0].part()
        self.tape("packing")
        parked.climb(COMPACT, [])
        readings.add("resume", bucket, sum(self.tape.of("packing")))

    def backfills(self, bucket: int, readings: Readings) -> None:
        """Of every number of layers, each at the end of a wave that went no higher: as a step leaves the caches."""
        for depth in range(1, self.num_layers):
            wave = self.wave(bucket, depth)
            self.tape.begin()
            wave.climb(OWN, [])
            readings.add(backfilling(self.num_layers - depth), bucket, sum(self.tape.of("backfill")))

    def check(self, bucket: int, measures: frozenset[Measure], readings: Readings) -> None:
        """The first check and a later one, with rows of these measures side by side; nobody crosses.

        Where rows have no slots of their own, each measure is timed over its share of the rows, one after another.
        """
        if not measures:
            return
        asked = sorted(measures)
        groups = [(bucket, asked)]
        if not self._taken:
            shares = [len(range(number, bucket, len(asked))) for number in range(len(asked))]
            groups = [(rows, [measure]) for rows, measure in zip(shares, asked, strict=True) if rows]
        seconds: dict[str, float] = {}
        for rows, named in groups:
            for name, value in self._checked(rows, named, checking(measures, first=True), checking(measures)).items():
                seconds[name] = seconds.get(name, 0.0) + value
        for name, value in seconds.items():
            readings.add(name, bucket, value)

    def _checked(self, count: int, measures: Sequence[Measure], first_name: str, name: str) -> dict[str, float]:
        checked = [layer for layer in range(1, self.num_layers + 1) if self.machine.checks(layer)] or [1]
        seconds: dict[str, float] = {}
        wave = self.wave(count, 0, measures)
        for layer, first in zip(checked[:2], (True, False), strict=False):
            self.tape.begin()
            wave.pause(COMPACT, layer)
            spent = self.tape.of("checks")[-1]
            if first:
                seconds[first_name] = spent
            if not first or len(checked) == 1:
                seconds[name] = spent
        if any(measure in HEAD_MEASURES for measure in measures):
            wave = self.wave(count, 0, measures, least=-1.0)
            self.tape.begin()
            wave.climb(OWN, [])
            seconds["early_head"] = sum(self.tape.of("head"))
        return seconds
