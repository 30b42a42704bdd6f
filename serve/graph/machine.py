"""An engine's half on the device: frames by bucket, steps that were captured, and the step that is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calm.config import BatchRule, Measure, Stepping
from calm.rules import Rule, bucket_of

from ..accounting import Clock
from ..requests import Row, Status
from ..wave import Spoken
from .frame import GIVEN, SAID, Frame
from .ops import TorchOps
from .program import Act, Program
from .stepping import Capture, stepper

if TYPE_CHECKING:
    from .bench import GraphBench

RUN_LENGTH = 3  # of ``agreement``, unless a request says another
NOBODY = 0  # token and step of rows that are none
BUFFERS = 2  # of what goes to and comes from the device: one step is on its way while the one before is read


class Mail:
    """Pinned memory for one step of at most ``most`` rows: what it is given, and what its rows said."""

    def __init__(self, most: int, device: torch.device) -> None:
        on_device = device.type == "cuda"
        self._given = torch.zeros(len(GIVEN) * most, dtype=torch.long, pin_memory=on_device)
        self._said = torch.zeros(len(SAID) * most, dtype=torch.long, pin_memory=on_device)
        self._event = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]

    def write(self, lines: Sequence[Sequence[int]]) -> None:
        """A line a row, in the order of GIVEN; waits until what was sent from here before has arrived."""
        if self._event is not None:
            self._event.synchronize()
        self._given[: len(GIVEN) * len(lines)] = torch.tensor(lines).t().flatten()

    def send(self, frame: Frame) -> None:
        frame.given.copy_(self._given[: frame.given.numel()].view_as(frame.given), non_blocking=True)

    def fetch(self, frame: Frame) -> None:
        self._said[: frame.said.numel()].view_as(frame.said).copy_(frame.said, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, frame: Frame, rows: int) -> list[list[int]]:
        """What the first ``rows`` said, once it is there; a line each of SAID."""
        if self._event is not None:
            self._event.synchronize()
        table: list[list[int]] = self._said[: frame.said.numel()].view_as(frame.said)[:, :rows].tolist()
        return table


@dataclass(frozen=True)
class Launch:
    """A step that was sent to the device: its rows, and the position that each of them decodes."""

    rows: list[Row]
    steps: list[int]
    frame: Frame
    mail: Mail


class GraphMachine:
    """What every wave of a graph engine is made with.

    Args:
        buckets: batch sizes that steps are captured for.
        overlap: send the next step before the present one's words are read, where no row needs the host to choose
            its word and rows do not depend on their mates. A row that ends runs one step in vain; one that joins
            speaks one call later.

    Attributes:
        measured: batch sizes that a cost table is measured at.
    """

    one_piece = True  # a step is one call: no row waits for company between two layers

    def __init__(
        self,
        ops: TorchOps,
        buckets: tuple[int, ...],
        capture: Capture,
        stepping: Stepping,
        overlap: bool,
        clock: Clock,
    ) -> None:
        self.ops, self.parts, self.clock = ops, ops.parts, clock
        self.measured = buckets
        self.overlap = overlap and not self.parts.record
        self.capture, self._stepping = capture, stepping
        self._frames: dict[int, Frame] = {}
        self._steps: dict[object, Act] = {}
        device = self.parts.slots.keys.device
        self._mails = [Mail(buckets[-1], device) for _ in range(BUFFERS)]
        self._sent = 0
        self._pending: Launch | None = None

    @property
    def num_layers(self) -> int:
        return self.parts.spec.num_layers

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes that a layer runs at: rows that do not run cost it nothing."""
        return tuple(range(1, self.parts.slots.count + 1))

    def bucket(self, rows: int) -> int:
        return bucket_of(self.measured, rows)

    def checks(self, layer: int) -> bool:
        """Whether rows may leave after this layer."""
        return layer in self.parts.checked

    def bench(self, max_source: int | None = None) -> GraphBench:
        """What a cost table is measured on."""
        from .bench import GraphBench

        return GraphBench(self, max_source)

    def step(self, rule: Rule, rows: Sequence[Row], bucket: int, alone: bool) -> Spoken:
        """Take rows one position further; what is told may be of the step before, or nothing yet.

        ``alone``: they are told at once, whatever is on its way is forgotten. A step that is sent again writes what it
        wrote before.
        """
        pending, self._pending = self._pending, None
        if alone or not self._overlaps(rule, rows):
            return self.told(self.launch(rule, rows, [row.step for row in rows], [False] * len(rows), bucket))
        known = {} if pending is None else dict(zip(map(id, pending.rows), pending.steps, strict=True))
        onward, steps, chained = [], [], []
        for row in rows:
            chains = known.get(id(row)) == row.step
            if not chains or row.step + 1 < row.limit:
                onward.append(row)
                steps.append(row.step + chains)
                chained.append(chains)
        if onward:
            self._pending = self.launch(rule, onward, steps, chained, self.bucket(len(onward)))
        return Spoken.nothing() if pending is None else self.told(pending)

    def forget(self) -> None:
        """Nobody waits for what is on its way."""
        self._pending = None

    def _overlaps(self, rule: Rule, rows: Sequence[Row]) -> bool:
        if not self.overlap or not rule.row_exact:
            return False
        return all(row.options.greedy and row.step + 1 >= row.options.min_tokens for row in rows)

    def launch(
        self, rule: Rule, rows: Sequence[Row], steps: Sequence[int], chained: Sequence[bool], bucket: int
    ) -> Launch:
        """Send a step to the device."""
        frame, act = self.frame(bucket), self.stepped(rule, bucket)
        mail = self.hand_over(frame, rows, steps, chained)
        mail.send(frame)
        act()
        mail.fetch(frame)
        self.clock("start")
        return Launch(list(rows), list(steps), frame, mail)

    def hand_over(self, frame: Frame, rows: Sequence[Row], steps: Sequence[int], chained: Sequence[bool]) -> Mail:
        """What a step of these rows is given, to be sent."""
        mail = self._mails[self._sent % BUFFERS]
        self._sent += 1
        lines = [
            [row.slot, step, row.next_input, int(on), 1] for row, step, on in zip(rows, steps, chained, strict=True)
        ]
        lines += [[self.parts.slots.padding, NOBODY, NOBODY, 0, 0]] * (frame.size - len(rows))
        mail.write(lines)
        return mail

    def told(self, launch: Launch) -> Spoken:
        """What the rows of a step said that still want to know."""
        table = launch.mail.read(launch.frame, len(launch.rows))
        said = dict(zip(SAID, table, strict=True))
        self._account(said["executed"])
        kept = [
            place
            for place, (row, step) in enumerate(zip(launch.rows, launch.steps, strict=True))
            if row.status is Status.running and row.step == step
        ]
        frame, confidences = launch.frame, None
        if self.parts.record:
            confidences = frame.confidences[kept].tolist()
        tokens, crossing, emission, executed, involuntary = ([line[i] for i in kept] for line in table)
        return Spoken(
            [launch.rows[i] for i in kept],
            tokens,
            crossing,
            emission,
            executed,
            [bool(value) for value in involuntary],
            lambda: frame.hidden[kept],
            lambda: self.ops.logits(frame.hidden)[kept],
            confidences,
        )

    def _account(self, executed: Sequence[int]) -> None:
        """The clock hears how many rows each layer ran on."""
        for layer in range(1, max(executed, default=0) + 1):
            self.clock.layers.append(sum(depth >= layer for depth in executed))
        self.clock("layers")

    def frame(self, bucket: int) -> Frame:
        if bucket not in self._frames:
            self._frames[bucket] = Frame.of(bucket, self.parts.spec, self.parts.slots, self.parts.record)
        return self._frames[bucket]

    def program(self, rule: Rule, bucket: int) -> Program:
        """The step of a bucket for the measures that rows are asked for at present."""
        return Program(self.ops, self.frame(bucket), rule, tuple(sorted(self.parts.exits.present)))

    @torch.inference_mode()
    def prepare(self, rules: Sequence[Rule], sets: Sequence[Sequence[Measure]]) -> None:
        """Capture the steps of all buckets under these rules for rows of these measures, each set by itself.

        Otherwise the first step of each kind takes as long as its capture.
        """
        for bucket in self.measured:
            for rule in rules:
                for measures in sets:
                    asked = tuple((each, RUN_LENGTH if each is Measure.agreement else 0) for each in sorted(measures))
                    self._captured(Program(self.ops, self.frame(bucket), rule, asked))

    def stepped(self, rule: Rule, bucket: int) -> Act:
        """A step as one call, captured the first time it is asked for."""
        return self._captured(self.program(rule, bucket))

    def _captured(self, program: Program) -> Act:
        rule = program.rule
        known = (program.frame.size, rule.name, rule.share if rule.name is BatchRule.quantile else 1.0, program.asked)
        if known not in self._steps:
            self._steps[known] = self.captured(program)
        return self._steps[known]

    def captured(self, program: Program) -> Act:
        """What is captured runs first, so it runs on a frame of nobody."""
        given = program.frame.given.clone()
        program.frame.given.zero_()
        program.frame.given[GIVEN.index("slots")] = self.parts.slots.padding
        act = stepper(program, self._stepping, self.capture)
        program.frame.given.copy_(given)
        return act
