"""A wave: rows of one batch on their way through the layers of one step (the engine's side of calm.rules.Wave).

The tensors of a wave always have the size of a bucket. Rows that leave are put aside with their crossing hidden until
the wave speaks; the others are packed into the bucket that is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.confidence import CONFIDENCE, HEAD_MEASURES, LayerView, Seen
from calm.config import Measure
from calm.rules import Flags, Rule, bucket_of, climb

from .accounting import Clock
from .exits import MEASURES, Exits
from .heads import HeadState, Vocabulary
from .requests import Row
from .runner import Runner


@dataclass
class Machine:
    """What every wave of an engine is made with.

    Attributes:
        checked: layers after which a row may leave.
        classifier: hidden -> P(exit).
        record: keep confidences.
        clock: told which phase of a step just ended.
    """

    runner: Runner
    exits: Exits
    head: Vocabulary
    buckets: tuple[int, ...]
    checked: frozenset[int]
    classifier: Callable[[Tensor], Tensor]
    record: bool
    clock: Clock
    one_piece: ClassVar[bool] = False  # the host follows a step layer by layer, and rows may wait between two
    overlap: ClassVar[bool] = False  # the next step is not sent before this one is read

    def bucket(self, rows: int) -> int:
        """The smallest batch size that holds ``rows``."""
        return bucket_of(self.buckets, rows)

    def bench(self, max_source: int | None = None) -> Any:
        """What a cost table is measured on."""
        from .bench import Bench

        return Bench(self, max_source)

    @property
    def measured(self) -> tuple[int, ...]:
        """The buckets that a cost table is measured at: all of them."""
        return self.buckets

    @property
    def num_layers(self) -> int:
        return self.runner.spec.num_layers

    @property
    def device(self) -> torch.device:
        return self.exits.depths.device


@dataclass
class Climbers:
    """Tensors of a wave's rows, one entry a row of the bucket; padding rows come last.

    Attributes:
        slots, steps: where their K/V is, and the position that is being decoded.
        thresholds: by layer, at that position.
        depths: fixed depth, 0 where confidences decide.
        measures: index into MEASURES, -1 without one.
        run_lengths: k of ``agreement``.
        hidden: residual stream; that of the crossing where the rule holds rows.
        previous: residual stream before the last layer.
        crossed, crossing: whether and where.
        argmax, run: of ``agreement``: the last check's word and how many checks in a row said it.
        candidates: of the candidate head.
    """

    slots: Int[Tensor, " rows"]
    steps: Int[Tensor, " rows"]
    thresholds: Float[Tensor, "rows layers"]
    depths: Int[Tensor, " rows"]
    measures: Int[Tensor, " rows"]
    run_lengths: Int[Tensor, " rows"]
    hidden: Float[Tensor, "rows d_model"]
    previous: Float[Tensor, "rows d_model"]
    crossed: Bool[Tensor, " rows"]
    crossing: Int[Tensor, " rows"]
    confidences: Float[Tensor, "rows recorded"]
    argmax: Tensor | None = None
    run: Tensor | None = None
    candidates: Tensor | None = None

    def select(self, index: Int[Tensor, " kept"]) -> "Climbers":
        values: dict[str, Any] = {}
        for each in fields(self):
            tensor = getattr(self, each.name)
            values[each.name] = None if tensor is None else tensor[index]
        return Climbers(**values)

    @classmethod
    def of(cls, parts: Sequence["Climbers"]) -> "Climbers":
        """The rows of all parts, one part after another."""
        values: dict[str, Tensor] = {}
        for each in fields(cls):
            known = [(getattr(part, each.name), part.slots.shape) for part in parts]
            like = next((tensor for tensor, _ in known if tensor is not None), None)
            if like is not None:
                # rows that were not asked for it have no measure that reads it
                values[each.name] = torch.cat(
                    [like.new_zeros(rows + like.shape[1:]) if tensor is None else tensor for tensor, rows in known]
                )
        return cls(**values)


@dataclass
class Spoken:
    """What a wave said, row for row; lists are on the host.

    ``states`` and ``logits`` give hidden states and logits of its rows, in this order; padding may follow.
    """

    rows: list[Row]
    tokens: list[int]
    crossing: list[int]
    emission: list[int]
    executed: list[int]
    involuntary: list[bool]
    states: Callable[[], Tensor]
    logits: Callable[[], Tensor]
    confidences: list[list[float]] | None

    @classmethod
    def nothing(cls) -> "Spoken":
        return cls([], [], [], [], [], [], *(lambda: torch.empty(0, 0),) * 2, None)


class EngineWave:
    """Rows that climb together, in a bucket that is the smallest that holds them unless it is given."""

    def __init__(self, machine: Machine, rule: Rule, rows: Sequence[Row], bucket: int | None = None) -> None:
        self.machine, self.rule, self.rows = machine, rule, list(rows)
        self.layer, self.age = 0, 0
        self.aside: list[tuple[list[Row], Climbers]] = []
        self.spoken: Spoken | None = None
        self._start(bucket or machine.bucket(len(self.rows)))
        machine.clock("start")

    def _start(self, bucket: int) -> None:
        machine, count = self.machine, len(self.rows)
        device = machine.device
        padding = bucket - count
        taken = [row.slot for row in self.rows]
        # neighbours from slot 0 on: their K/V is read in place, and padding rows are the free slots that follow
        self.prefix = taken == list(range(count)) and machine.runner.slots.are_free(range(count, bucket))
        padded = range(count, bucket) if self.prefix else [machine.runner.slots.padding] * padding
        slots = torch.tensor([*taken, *padded], device=device)
        steps = torch.tensor([row.step for row in self.rows] + [0] * padding, device=device)
        tokens = torch.tensor([row.next_input for row in self.rows] + [0] * padding, device=device)
        thresholds, depths, measures, run_lengths = machine.exits.at(slots, steps)
        hidden = machine.runner.embed(tokens, slots, steps)
        self.at = Climbers(
            slots,
            steps,
            thresholds,
            depths,
            measures,
            run_lengths,
            hidden,
            hidden,
            torch.zeros(bucket, dtype=torch.bool, device=device),
            torch.full((bucket,), machine.num_layers, device=device),
            torch.full((bucket, machine.num_layers if machine.record else 0), float("nan"), device=device),
        )
        self.live = torch.arange(bucket, device=device) < count

    @property
    def size(self) -> int:
        return len(self.rows)

    def climb(self, rule: Rule, parked: list[Any], patient: bool = True) -> None:
        """To the end of its step, as ``calm.rules.climb`` says."""
        climb(self, rule, self.machine.num_layers, parked, patient)

    def run(self, layer: int) -> None:
        at = self.at
        out = self.machine.runner.layer(layer, at.hidden, at.slots, at.steps, self.prefix)
        at.previous = at.hidden
        at.hidden = torch.where(at.crossed[:, None], at.hidden, out) if self.rule.holds else out
        self.layer = layer
        self.machine.clock.layer(at.hidden.shape[0])

    def check(self, layer: int) -> Flags:
        at = self.at
        now = (at.depths > 0) & (at.depths <= layer)
        if layer in self.machine.checked and self.machine.exits.present:
            confidence = self._confidence(layer)
            now = now | (confidence >= at.thresholds[:, layer - 1])
            if self.machine.record:
                held = at.crossed if self.rule.holds else torch.zeros_like(at.crossed)
                at.confidences[:, layer - 1] = torch.where(held, float("nan"), confidence)
        newly = now & ~at.crossed
        at.crossing = torch.where(newly, layer, at.crossing)
        at.crossed = at.crossed | newly
        self.machine.clock("checks")
        return Flags(self.live, at.crossed, now)

    def _confidence(self, layer: int) -> Float[Tensor, " rows"]:
        """Each row's own measure; NaN for rows without one."""
        machine, at = self.machine, self.at
        state = HeadState(at.candidates, self.live)
        before = None if at.argmax is None or at.run is None else Seen(at.argmax, at.run)
        view = LayerView(
            layer,
            at.hidden,
            at.previous if layer > 1 else None,
            lambda hidden: machine.head.check(hidden, state),
            machine.classifier,
            before,
        )
        result = torch.full_like(at.thresholds[:, 0], float("nan"))
        for measure, run_length in machine.exits.present:
            view.agreement_k = run_length
            if measure is Measure.agreement and "argmax" not in view.__dict__:
                view.__dict__["argmax"] = machine.head.words(view.logits.argmax(dim=-1), state)
                at.argmax, at.run = view.argmax, view.run
            asked = (at.measures == MEASURES.index(measure)) & (at.run_lengths == run_length)
            result = torch.where(asked, CONFIDENCE[measure](view), result)
        at.candidates = state.candidates
        machine.clock.fallbacks += state.fallbacks
        return result

    def told(self, flag: Bool[Tensor, ""]) -> bool:
        return self.machine.runner.told(flag)

    def leave(self) -> None:
        crossed = self.at.crossed.tolist()
        gone = [i for i in range(self.size) if crossed[i]]
        if gone:
            self._put_aside(gone)
            self._keep([i for i in range(self.size) if not crossed[i]])
        self.machine.clock("packing")

    def _put_aside(self, places: list[int]) -> None:
        index = torch.tensor(places, device=self.machine.device)
        self.aside.append(([self.rows[i] for i in places], self.at.select(index)))

    def _keep(self, places: list[int]) -> None:
        """Pack these rows into their bucket."""
        self._pack([self.rows[i] for i in places], self.at, places)

    def _pack(self, rows: list[Row], climbers: Climbers, places: list[int]) -> None:
        """These rows, which are at these places among the climbers, in the bucket that holds them."""
        device = self.machine.device
        bucket = self.machine.bucket(len(rows))
        self.live = torch.arange(bucket, device=device) < len(rows)
        self.at = climbers.select(torch.tensor(places + places[-1:] * (bucket - len(rows)), device=device))
        self.at.slots = torch.where(self.live, self.at.slots, self.machine.runner.slots.padding)
        self.at.steps = torch.where(self.live, self.at.steps, 0)
        self.rows, self.prefix = rows, False

    def join(self, other: "EngineWave") -> None:
        """Take in rows that wait at the same layer; the wave is as old as its oldest row."""
        mine = self.at.slots.shape[0]
        places = [*range(self.size), *range(mine, mine + other.size)]
        self._pack(self.rows + other.rows, Climbers.of([self.at, other.at]), places)
        self.age = max(self.age, other.age)
        self.machine.clock("packing")

    def part(self) -> "EngineWave":
        """All rows that are still climbing, as a wave of their own; what is left here only speaks."""
        other = object.__new__(EngineWave)
        other.__dict__.update(self.__dict__)
        other.aside = []  # and it is as old as its oldest row: who joins it makes nobody younger
        if other.prefix:  # by the time it goes on, the slots beside it may belong to others
            other.prefix = False
            other.at = replace(self.at, slots=torch.where(self.live, self.at.slots, self.machine.runner.slots.padding))
        self.rows = []
        for row in other.rows:
            row.parked += 1
        return other

    def drop(self, row: Row) -> bool:
        """Forget a row that was aborted while it waited, if it is here; False when nobody is left."""
        places = [i for i in range(self.size) if self.rows[i] is not row]
        if places and len(places) < self.size:
            self._keep(places)
        elif not places:
            self.rows = []
        return bool(self.rows)

    def speak(self) -> None:
        """Tokens of the rows that are through; K/V of the layers above their exits."""
        machine = self.machine
        parts = [*self.aside, (self.rows, self.at)] if self.rows else self.aside
        rows = [row for part, _ in parts for row in part]
        if not rows:
            self.spoken = Spoken.nothing()
            return
        if self.aside:
            # only the last part may have padding, at its end
            self._pack(rows, Climbers.of([climbers for _, climbers in parts]), list(range(len(rows))))
            machine.clock("packing")
        at, last = self.at, machine.num_layers
        stop = torch.full_like(at.crossing, self.layer)
        emission = torch.minimum(at.crossing, stop) if self.rule.holds else stop
        executed = emission if self.rule.leaves else stop
        by_head = torch.zeros_like(at.crossed)
        for measure in HEAD_MEASURES:
            by_head |= at.measures == MEASURES.index(measure)
        early = at.crossed & (emission < last) & (at.depths == 0) & by_head
        state = HeadState(at.candidates, self.live)
        tokens = machine.head.emit(at.hidden, early, state)
        machine.clock.fallbacks += state.fallbacks
        machine.clock("head")
        involuntary = ~at.crossed & (emission < last)
        count = len(rows)
        written = torch.where(machine.exits.fills[at.slots], executed, last) if self.rule.row_exact else executed
        table = torch.stack([tokens, at.crossing, emission, executed, involuntary.long(), written])[:, :count].tolist()
        machine.clock("read")
        above = min(table[5])
        if above < last:
            machine.runner.backfill(at.hidden, at.slots, at.steps, written, above)
            machine.clock("backfill")
        self.spoken = Spoken(
            rows,
            table[0],
            table[1],
            table[2],
            table[3],
            [bool(value) for value in table[4]],
            lambda: at.hidden,
            lambda: machine.runner.logits(at.hidden),
            at.confidences[:count].tolist() if machine.record else None,
        )
