"""The engine without tensors: recorded depths climb under any batch rule, and a cost table says how long it takes.

The layers are climbed by calm.rules itself, over waves whose crossings are known beforehand. Row-exact traces do not
depend on the schedule, so one recording predicts every row-exact rule, batch size and arrival pattern; under the
batch-coupled rules a recording stands for rows whose depth is given (policy replay).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from .config import BatchRule, Measure
from .cost import CostTable, backfilling, checking
from .last_used import LastUsed
from .rules import Flags, Rule, climb, next_group, next_parked
from .sim_rows import Setting, SimRow, Trace

Spoken = tuple[SimRow, int, int]  # a row, the layer that gave its token, layers that ran with it


@dataclass(frozen=True)
class SimStep:
    """One step, as serve.accounting.StepRecord tells it; seconds are predicted."""

    rows: int
    tokens: int
    rule: BatchRule | None
    layers: tuple[int, ...]
    parked: int
    admitted: int
    encoder_calls: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@runtime_checkable
class Chooser(Protocol):
    """Who picks the rule of every wave, and is told what it brought: as serve.choice.RuleChoice does."""

    def rule(self, running: int, parked: bool, measures: Iterable[Measure]) -> Rule:
        """Of the next wave, for so many running rows, of which some may be parked, that ask these measures."""
        ...

    def saw(self, crossings: Iterable[int], rows: Iterable[Hashable]) -> None:
        """Crossing layers of the rows that spoke in a step."""
        ...


class SimWave:
    """Rows that climb together (calm.rules.Wave)."""

    def __init__(self, engine: "SimEngine", rule: Rule, rows: Sequence[SimRow]) -> None:
        self.engine, self.rule, self.rows = engine, rule, list(rows)
        self.layer, self.age = 0, 0
        self.aside: list[list[SimRow]] = []
        self.bucket = engine.setting.bucket(self.size)
        taken = [row.slot for row in self.rows]
        self.in_place = taken == list(range(self.size)) and engine.taken.isdisjoint(range(self.size, self.bucket))
        self.spoken: list[Spoken] = []
        self._look()
        engine.pay("start", "start", self.bucket)

    def _look(self) -> None:
        self._depths = torch.tensor([row.depth for row in self.rows])
        self._live = torch.ones(self.size, dtype=torch.bool)

    @property
    def size(self) -> int:
        return len(self.rows)

    def run(self, layer: int) -> None:
        self.layer = layer
        self.engine.layers.append(self.bucket)
        self.engine.pay("layers", "layer" if self.in_place else "layer_gathered", self.bucket)

    def check(self, layer: int) -> Flags:
        self.engine.pay_check(layer, self.bucket, self._asked(layer))
        crossed = self._depths <= layer
        return Flags(self._live, crossed, crossed)

    def _asked(self, layer: int) -> int:
        """Rows whose confidence is asked after this layer: not those that a rule holds where they crossed."""
        return sum(bool(row.trace.measures) and not (self.rule.holds and row.depth < layer) for row in self.rows)

    def told(self, flag: Bool[Tensor, ""]) -> bool:
        return bool(flag)

    def leave(self) -> None:
        gone = [row for row in self.rows if row.depth <= self.layer]
        self.engine.pay("packing", "pack" if gone else "stay", self.bucket)
        if gone:
            self.aside.append(gone)
            self._pack([row for row in self.rows if row.depth > self.layer])

    def _pack(self, rows: list[SimRow]) -> None:
        self.rows, self.in_place = rows, False
        self.bucket = self.engine.setting.bucket(self.size)
        self._look()

    def join(self, other: "SimWave") -> None:
        self._pack(self.rows + other.rows)
        self.age = max(self.age, other.age)
        self.engine.pay("packing", "join", self.bucket)

    def part(self) -> "SimWave":
        other = object.__new__(SimWave)
        other.__dict__.update(self.__dict__)
        other.aside, other.spoken, other.in_place = [], [], False
        self.rows = []
        for row in other.rows:
            row.parked += 1
        return other

    def speak(self) -> None:
        parts = [*self.aside, self.rows] if self.rows else self.aside
        rows = [row for part in parts for row in part]
        if not rows:
            return
        pay, last = self.engine.pay, self.engine.setting.num_layers
        if self.aside:
            self.bucket = self.engine.setting.bucket(len(rows))
            pay("packing", "merge", self.bucket)
            pay("packing", "part", self.bucket, len(parts))
        for row in rows:
            emission = min(row.depth, self.layer) if self.rule.holds else self.layer
            self.spoken.append((row, emission, emission if self.rule.leaves else self.layer))
        ends = [executed if row.trace.fills or not self.rule.row_exact else last for row, _, executed in self.spoken]
        if self.engine.setting.one_piece:
            pay("head", "head", len(rows))
            pay("read", "read", len(rows))
            pay("layers", "idle", len(rows), last - self.layer)
            if min(ends) < last:
                pay("backfill", backfilling(last - min(ends)), len(rows))
            return
        early = sum(row.asks_head and row.depth <= self.layer and emission < last for row, emission, _ in self.spoken)
        late = len(rows) - early
        if self.engine.setting.packed:
            pay("head", "head" if late else "early_head", self.bucket)
        else:
            for name, count in (("head", late), ("early_head", early)):
                if count:
                    pay("head", name, count)
        pay("read", "read", self.bucket)
        if self.engine.setting.packed:
            if min(ends) < last:
                pay("backfill", backfilling(last - min(ends)), self.bucket)
            return
        for layer in range(min(ends) + 1, last + 1):
            pay("backfill", backfilling(1), sum(end < layer for end in ends))


@dataclass(frozen=True)
class Simulated:
    """What a whole simulation brought; rows in the order they were given."""

    steps: tuple[SimStep, ...]
    rows: tuple[SimRow, ...]
    seconds: float

    @property
    def executed(self) -> list[tuple[int, ...]]:
        return [tuple(row.executed) for row in self.rows]

    @property
    def emission(self) -> list[tuple[int, ...]]:
        return [tuple(row.emission) for row in self.rows]

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.steps) / max(self.seconds, 1e-12)

    @property
    def inner_token_latency(self) -> float:
        """Time between tokens as arXiv 2407.20272 has it: sum of (end - first token) by all tokens, in seconds."""
        decoding = sum(row.ended - row.first_token for row in self.rows)
        return decoding / max(1, sum(step.tokens for step in self.steps))


class SimEngine:
    """What serve.engine.Engine does step by step, without the model.

    Args:
        rule: one rule, or who picks the rule of every wave.

    Attributes:
        now: second on the simulated clock.
        taken: slots in use.
    """

    def __init__(self, table: CostTable, setting: Setting, rule: Rule | Chooser) -> None:
        self.table, self.setting = table, setting
        self._rule = rule
        self.now = 0.0
        self.taken: set[int] = set()
        self.running: list[SimRow] = []
        self.waiting: list[SimRow] = []
        self.parked: list[SimWave] = []
        # sources whose cross K/V is kept
        self._known: LastUsed[None] = LastUsed(setting.cross_cache_rows, setting.cross_cache_tokens)
        self._arrivals = 0
        self.layers: list[int] = []
        self._asked: frozenset[Measure] = frozenset()
        self._seconds: dict[str, float] = {}

    def add(self, trace: Trace) -> SimRow:
        """A request joins the queue."""
        row = SimRow(self._arrivals, trace, self.setting.prompted)
        self._arrivals += 1
        self.waiting.append(row)
        return row

    def place(self, traces: Sequence[Trace]) -> list[SimRow]:
        """Requests that run already: no encoder, no admission, and no prompt that speaks."""
        rows = [self.add(trace) for trace in traces]
        self.waiting.clear()
        for row in rows:
            row.prompted = False
            self._take_slot(row)
        return rows

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def pay(self, phase: str, name: str, size: int = 1, times: int | float = 1) -> None:
        cost = self.table.at(name, size) * times
        self._seconds[phase] = self._seconds.get(phase, 0.0) + cost
        self.now += cost

    def pay_check(self, layer: int, bucket: int, asked: int) -> None:
        """After this layer: of the whole bucket, or without packing of the rows that are asked."""
        if layer not in self.setting.checked or not (asked or self.setting.packed):
            self.pay("checks", checking(()), bucket)
            return
        name = checking(self._asked, layer == min(self.setting.checked))
        self.pay("checks", name, bucket if self.setting.packed else asked)

    def step(self) -> SimStep:
        """One step of the engine."""
        self._seconds, self.layers = {}, []
        self.pay("host", "step")
        admitted, calls = self._admit()
        rows, tokens, rule = len(self.running), 0, None
        if climbing := sum(row.climbs for row in self.running):
            rule = self._pick(climbing)
            spoken = self._wave(rule)
            if not isinstance(self._rule, Rule):
                self._rule.saw([row.depth for row, _, _ in spoken], [row.number for row, _, _ in spoken])
            tokens = self._take(spoken)
        tokens += self._first_words()
        if rule is not None and self.setting.overlaps and rule.row_exact:
            self._overlap()
        self._move_together()
        parked = sum(wave.size for wave in self.parked)
        ran = tuple(self.layers)
        return SimStep(rows, tokens, rule.name if rule else None, ran, parked, admitted, calls, self._seconds)

    def run(self, traces: Sequence[Trace]) -> Simulated:
        """All requests to their end, each from when it arrives."""
        coming = sorted(range(len(traces)), key=lambda i: traces[i].arrived)
        rows: dict[int, SimRow] = {}
        steps = []
        while coming or self.has_work:
            if not self.has_work:
                self.now = max(self.now, traces[coming[0]].arrived)
            while coming and traces[coming[0]].arrived <= self.now:
                number = coming.pop(0)
                rows[number] = self.add(traces[number])
            steps.append(self.step())
        return Simulated(tuple(steps), tuple(rows[i] for i in range(len(traces))), self.now)

    def _admit(self) -> tuple[int, int]:
        admitted = calls = 0
        while len(self.taken) < self.setting.buckets[-1] and self.waiting:
            known = self.waiting[0].key in self._known
            if not known and calls == self.setting.prefill_calls:
                break
            room = min(self.setting.prefill_rows, self.setting.buckets[-1] - len(self.taken))
            group = next_group(self.waiting, room, self.setting.alike, self._known)
            chosen = {id(row) for row in group}
            self.waiting = [row for row in self.waiting if id(row) not in chosen]
            if not known:
                calls += 1
                self._encode(group)
            for row in group:
                self._known.put(row.key, None, row.length)
                self._take_slot(row)
                self.pay("prefill", "admit")
                admitted += 1
        return admitted, calls

    def _encode(self, group: list[SimRow]) -> None:
        """A call costs what it was measured at with all its rows; without padding, each row its share of that."""
        if self.setting.padded_calls:
            self.pay("prefill", "encode", self.setting.padded(group[0].length))
            return
        for row in group:
            self.pay("prefill", "encode", self.setting.padded(row.length), 1 / self.setting.prefill_rows)

    def _take_slot(self, row: SimRow) -> None:
        row.slot = next(slot for slot in range(self.setting.buckets[-1]) if slot not in self.taken)
        self.taken.add(row.slot)
        self.running.append(row)

    def _overlap(self) -> None:
        """Host and device work side by side: the shorter of the two takes no time of its own."""
        host = sum(self._seconds.get(phase, 0.0) for phase in ("host", "read"))
        device = sum(self._seconds.get(phase, 0.0) for phase in ("start", "layers", "checks", "head", "backfill"))
        self._seconds["overlapped"] = -min(host, device)
        self.now -= min(host, device)

    def _pick(self, climbing: int) -> Rule:
        self._asked = frozenset[Measure]().union(*(row.trace.measures for row in self.running))
        if isinstance(self._rule, Rule):
            return self._rule
        return self._rule.rule(climbing, bool(self.parked), self._asked)

    def _wave(self, rule: Rule) -> list[Spoken]:
        """What the wave whose turn it is said."""
        waiting = {id(row) for wave in self.parked for row in wave.rows}
        fresh = [row for row in self.running if id(row) not in waiting and row.climbs]
        wave = next_parked(self.parked, rule, len(fresh))
        patient = wave is None
        if wave is None:
            if not fresh:
                return []
            wave = SimWave(self, rule, fresh)
        else:
            self.parked.remove(wave)
            if "resume" in self.table.seconds:
                self.pay("start", "resume", wave.size)
        climb(wave, rule, self.setting.num_layers, self.parked, patient)
        assert isinstance(wave, SimWave)
        return wave.spoken

    def _first_words(self) -> int:
        """Tokens that the prompts of rows that have none yet say."""
        rows = [row for row in self.running if not row.climbs]
        if rows:
            self.pay("head", "head", self.setting.bucket(len(rows)))
        return self._take([(row, self.setting.num_layers, self.setting.num_layers) for row in rows])

    def _take(self, spoken: Sequence[Spoken]) -> int:
        for row, emission, executed in spoken:
            row.first_token = row.first_token if row.emission else self.now
            row.emission.append(emission)
            row.executed.append(executed)
            self.pay("host", "row")
            if row.over:
                row.ended = self.now
                self.running.remove(row)
                self.taken.remove(row.slot)
                self.pay("slots", "end")
        return len(spoken)

    def _move_together(self) -> None:
        if self.parked:
            return
        self.running.sort(key=lambda row: row.slot)
        for place, row in enumerate(self.running):
            if row.slot != place:
                self.taken.remove(row.slot)
                self.taken.add(place)
                row.slot = place
                self.pay("slots", "move")
