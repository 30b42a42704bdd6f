"""A wave under the native runner: rows by slot, taken up and made to speak in one call each (see step.cpp).

Nothing is packed or gathered: a row's state lies in its slot, and a wave is a list of slots. So there are no buckets
either: a layer runs on as many rows as there are.
"""

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from calm.config import BatchRule
from calm.rules import Rule

from ..requests import Row
from ..wave import Spoken
from .machine import NativeMachine
from .views import ALL_CROSSED, INT, LOCKSTEP, PARKED, PAUSED, PHASES, QUANTILE, WaveView

STOPS = {BatchRule.quantile: QUANTILE, BatchRule.lockstep: LOCKSTEP}
SAID = ("tokens", "crossing", "emission", "executed", "involuntary")


class Memory:
    """What a wave is told with: a view and its arrays, used by one wave after another."""

    def __init__(self, most: int, num_layers: int) -> None:
        self.active, self.done = (INT * most)(), (INT * most)()
        self.said = [(INT * most)() for _ in SAID]
        self.batch = (INT * num_layers)()
        self.seconds = (ctypes.c_double * len(PHASES))()
        arrays: list[Any] = [self.active, self.done, *self.said, self.batch, self.seconds]
        self.view = WaveView()
        for name, array in zip(("active", "done", *SAID, "batch", "seconds"), arrays, strict=True):
            setattr(self.view, name, ctypes.addressof(array))


class NativeWave:
    """Rows that climb together."""

    def __init__(self, machine: NativeMachine, rows: Sequence[Row]) -> None:
        self.machine, self.age = machine, 0
        self.spoken: Spoken | None = None
        step, token = machine.step, machine.token
        for row in rows:
            step[row.slot] = len(row.tokens)
            token[row.slot] = row.next_input
        self._take(rows)
        machine.start(self._memory.view)
        machine.clock("start")

    def _take(self, rows: Sequence[Row]) -> None:
        spare = self.machine.spare
        self._memory = spare.pop() if spare else Memory(self.machine.slots.count + 1, self.machine.num_layers)
        slots = [row.slot for row in rows]
        self._by_slot = dict(zip(slots, rows, strict=True))
        self._active, view = self._memory.active, self._memory.view
        self._active[: len(slots)] = slots
        view.active_count, view.done_count, view.layer, view.fallbacks = len(slots), 0, 0, 0
        view.company, view.pause_at = 0, 0
        self._view = view

    @property
    def layer(self) -> int:
        """Layers that its rows have behind them."""
        return int(self._view.layer)

    @property
    def size(self) -> int:
        """Rows that are still climbing."""
        return int(self._view.active_count)

    @property
    def rows(self) -> list[Row]:
        """Rows that are still climbing."""
        return [self._by_slot[slot] for slot in self._active[: self.size]]

    def climb(self, rule: Rule, parked: list[Any], patient: bool = True) -> None:
        """``calm.rules.climb`` over this wave."""
        view = self._view
        self._follow(rule)

        def company() -> int:  # joining may make the wave too old to wait
            return rule.company if rule.waits and patient and self.age <= rule.max_age else 0

        while True:
            view.company = company()
            view.pause_at = sum({1 << wave.layer for wave in parked}) if rule.leaves else 0
            status = self.machine.climb(view)
            if status == PAUSED:
                for other in [wave for wave in parked if wave.layer == self.layer]:
                    parked.remove(other)
                    self.join(other)
                if self.size >= company():
                    continue
                status = PARKED
            if status == PARKED:
                parked.append(self.part())
            break
        self.speak()

    def pause(self, rule: Rule, layer: int) -> None:
        """Up to this layer, where crossed rows have left and the others stay as they are."""
        self._follow(rule)
        self._view.pause_at = 1 << layer
        self.machine.climb(self._view)
        self._tell()

    def _follow(self, rule: Rule) -> None:
        view = self._view
        view.holds, view.leaves = rule.holds, rule.leaves
        view.cpu_time = self.machine.clock.now is time.thread_time
        view.stop, view.share = STOPS.get(rule.name, ALL_CROSSED), rule.share

    def _tell(self) -> None:
        """The clock hears of layers and seconds."""
        memory, clock = self._memory, self.machine.clock
        clock.layers += filter(None, memory.batch)
        clock.spent(dict(zip(PHASES, memory.seconds, strict=True)), "packing")
        ctypes.memset(memory.batch, 0, ctypes.sizeof(memory.batch))
        ctypes.memset(memory.seconds, 0, ctypes.sizeof(memory.seconds))

    def join(self, other: "NativeWave") -> None:
        """Take in rows that wait at the same layer; the wave is as old as its oldest row."""
        size, more = self.size, other.size
        for place, slot in enumerate(other._active[:more], start=size):
            self._active[place] = slot
        self._view.active_count = size + more
        self._by_slot.update({row.slot: row for row in other.rows})
        self.age = max(self.age, other.age)
        self.machine.spare.append(other._memory)

    def part(self) -> "NativeWave":
        """All rows that are still climbing, as a wave of their own; what is left here only speaks."""
        other = object.__new__(NativeWave)
        other.machine, other.age, other.spoken = self.machine, self.age, None
        other._take(self.rows)
        other._view.layer = self.layer
        self._view.active_count = 0
        for row in other.rows:
            row.parked += 1
        return other

    def drop(self, row: Row) -> bool:
        """Forget a row that was aborted while it waited, if it is here; False when nobody is left."""
        kept = [slot for slot in self._active[: self.size] if self._by_slot[slot] is not row]
        for place, slot in enumerate(kept):
            self._active[place] = slot
        self._view.active_count = len(kept)
        return bool(kept)

    def speak(self) -> None:
        """Tokens of the rows that are through; K/V of the layers above their exits."""
        machine, view = self.machine, self._view
        count = view.done_count + view.active_count
        if not count:
            self._tell()
            machine.spare.append(self._memory)
            self.spoken = Spoken.nothing()
            return
        machine.speak(view)
        self.spoken = self._said(count)

    def follow(self, layers: Sequence[int]) -> Spoken:
        """These layers of all rows and no others, to their words."""
        view = self._view
        view.holds, view.cpu_time = False, self.machine.clock.now is time.thread_time
        self.machine.follow(view, layers)
        return self._said(view.active_count)

    def _said(self, count: int) -> Spoken:
        machine, memory = self.machine, self._memory
        self._tell()
        machine.clock.fallbacks += self._view.fallbacks
        slots = memory.done[:count]
        confidences = machine.confidences[slots].tolist() if machine.record else None
        tokens, crossing, emission, executed, involuntary = (array[:count] for array in memory.said)
        machine.spare.append(memory)
        spoken = Spoken(
            [self._by_slot[slot] for slot in slots],
            tokens,
            crossing,
            emission,
            executed,
            [bool(value) for value in involuntary],
            partial(machine.states, slots),
            partial(machine.logits, slots),
            confidences,
        )
        machine.clock("read")
        return spoken
