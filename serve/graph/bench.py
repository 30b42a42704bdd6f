"""What serve.measure times under the graph runner: the pieces of a step, each several times in one captured go.

By itself a piece would cost a launch and a wait for the device that it does not cost within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from calm.confidence import HEAD_MEASURES
from calm.config import BatchRule, Measure
from calm.cost import backfilling, checking
from calm.rules import Rule

from ..bench import MadeUp, Readings, Tape
from ..exits import MEASURES
from .machine import RUN_LENGTH, GraphMachine
from .program import Act, Program

OWN = Rule(BatchRule.own)
TIMES = 16  # that a piece is run in one go


class GraphBench(MadeUp):
    """Made-up rows on a graph engine's machine, whose depths are set by hand."""

    def __init__(self, machine: GraphMachine, max_source: int | None = None) -> None:
        parts, tape = machine.parts, Tape(machine.clock.now)
        super().__init__(parts.spec, parts.slots, parts.exits, tape, parts.slots.keys, max_source)
        self.machine, self._clock, machine.clock = machine, machine.clock, tape
        self._goes: dict[object, Act] = {}

    def close(self) -> None:
        self.machine.clock = self._clock
        self.machine.forget()
        for slot in self._taken or [self.slots.padding]:
            self.exits.clear(slot)
        super().close()

    def begun(self, bucket: int, measures: Sequence[Measure] = ()) -> Program:
        """A step at layer 0 of rows that leave nowhere below the last layer."""
        rows = self.rows(bucket)
        for number, row in enumerate(rows):
            self.exits.depths[row.slot] = 0 if measures else self.num_layers
            self.exits.thresholds[row.slot] = float("inf")
            measure = measures[number % len(measures)] if measures else None
            self.exits.measures[row.slot] = -1 if measure is None else MEASURES.index(measure)
            self.exits.run_lengths[row.slot] = RUN_LENGTH if measure is Measure.agreement else 0
        frame = self.machine.frame(bucket)
        self.machine.hand_over(frame, rows, [row.step for row in rows], [False] * bucket).send(frame)
        asked = tuple((each, RUN_LENGTH if each is Measure.agreement else 0) for each in sorted(set(measures)))
        program = Program(self.machine.ops, frame, OWN, asked)
        program.begin()
        return program

    def waves(self, bucket: int, readings: Readings) -> None:
        """Who leaves and who joins costs nothing: nothing is packed or gathered."""
        program = self.begun(bucket)
        ops, frame = self.machine.ops, program.frame
        self._timed("start", bucket, [program.begin], readings)
        # one after the other as in a step: a card's cache may hold the weights of one layer, and not those of all
        layers = [partial(program.layer, layer) for layer in range(1, max(2, self.num_layers))]
        layer = self._timed("layer", bucket, layers, readings)
        readings.add("layer_gathered", bucket, layer)
        self._timed("head", bucket, [lambda: frame.said[0].copy_(ops.words(frame))], readings)
        self._idle(bucket, program, readings)
        mail = self.machine.hand_over(frame, self.rows(bucket), [0] * bucket, [False] * bucket)
        began = self.tape.now()
        mail.fetch(frame)
        mail.read(frame, bucket)
        readings.add("read", bucket, self.tape.now() - began)
        for name in ("pack", "merge", "part", "stay", "join", "resume", checking(())):
            readings.add(name, bucket, 0.0)

    def _idle(self, bucket: int, program: Program, readings: Readings) -> None:
        """A layer after the end of a step: kernels that find nobody."""
        program.frame.stopped.fill_(True)
        self.machine.ops.who_runs(program.frame, torch.zeros_like(program.frame.live))
        self._timed("idle", bucket, [partial(program.layer, 1)], readings)

    def backfills(self, bucket: int, readings: Readings) -> None:
        program = self.begun(bucket)
        for depth in range(1, self.num_layers):
            executed = torch.full_like(program.frame.layers, depth).expand(bucket).contiguous()
            fill = partial(self.machine.ops.backfill, program.frame, executed)
            self._timed(backfilling(self.num_layers - depth), bucket, [fill], readings)

    def check(self, bucket: int, measures: frozenset[Measure], readings: Readings) -> None:
        """With rows of these measures side by side; a later check costs what the first does."""
        if not measures:
            return
        program = self.begun(bucket, sorted(measures))
        layer = min((each for each in range(2, self.num_layers + 1) if self.machine.checks(each)), default=1)
        ask = partial(self.machine.ops.confide, layer, program.frame, program.asked, True)
        seconds = self._timed(checking(measures), bucket, [ask], readings)
        readings.add(checking(measures, first=True), bucket, seconds)
        if any(measure in HEAD_MEASURES for measure in measures):
            words = partial(self.machine.ops.words, program.frame)
            self._timed("early_head", bucket, [words], readings)

    def _timed(self, name: str, bucket: int, acts: Sequence[Callable[[], object]], readings: Readings) -> float:
        """Seconds of one of ``acts``: they are run in turn, TIMES calls in all."""
        known = (name, bucket)
        if known not in self._goes:
            self._goes[known] = self.machine.capture(partial(_repeat, acts))
        device = self.slots.keys.device
        _wait(device)
        began = self.tape.now()
        self._goes[known]()
        _wait(device)
        seconds = (self.tape.now() - began) / TIMES
        readings.add(name, bucket, seconds)
        return seconds


def _repeat(acts: Sequence[Callable[[], object]]) -> None:
    for number in range(TIMES):
        acts[number % len(acts)]()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
