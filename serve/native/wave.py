"""A wave under the native runner: rows by slot, taken up and made to speak in one call each (see step.cpp).

Nothing is packed or gathered: a row's state lies in its slot, and a wave is a list of slots. So there are no buckets
either: a layer runs on as many rows as there are.
"""

import ctypes
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


class NativeWave:
    """Rows that climb together."""

    def __init__(self, machine: NativeMachine, rule: Rule, rows: Sequence[Row], bucket: int | None = None) -> None:
        self.machine, self.age = machine, 0
        self.spoken: Spoken | None = None
        self._by_slot: dict[int, Row] = {}
        self._make(list(rows))
        for row in self.rows:
            machine.step[row.slot] = row.step
            machine.token[row.slot] = row.next_input
        machine.start(self._view)
        machine.clock("start")

    def _make(self, rows: list[Row]) -> None:
        most = self.machine.slots.count + 1
        self._by_slot = {row.slot: row for row in rows}
        self._active = (INT * most)(*self._by_slot)
        self._done = (INT * most)()
        self._said = {name: (INT * most)() for name in ("tokens", "crossing", "emission", "executed", "involuntary")}
        self._batch = (INT * self.machine.num_layers)()
        self._seconds = (ctypes.c_double * len(PHASES))()
        self._view = WaveView(active_count=len(rows))
        for name, array in (("active", self._active), ("done", self._done), ("batch", self._batch)):
            setattr(self._view, name, ctypes.addressof(array))
        for name, array in self._said.items():
            setattr(self._view, name, ctypes.addressof(array))
        self._view.seconds = ctypes.addressof(self._seconds)

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
        while True:
            waits = rule.waits and patient and self.age <= rule.max_age
            view.company = rule.company if waits else 0
            view.pause_at = sum({1 << wave.layer for wave in parked}) if rule.leaves else 0
            status = self.machine.climb(view)
            self._told()
            if status == PAUSED:
                for other in [wave for wave in parked if wave.layer == self.layer]:
                    parked.remove(other)
                    self.join(other)
                waits = rule.waits and patient and self.age <= rule.max_age
                if not (waits and self.size < rule.company):
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
        self._told()

    def share(self, count: int) -> None:
        """As many rows in the one slot that this wave has: for what is timed, not read."""
        for place in range(count):
            self._active[place] = self._active[0]
        self._view.active_count = count

    def _follow(self, rule: Rule) -> None:
        view = self._view
        view.holds, view.leaves = rule.holds, rule.leaves
        view.stop, view.share = STOPS.get(rule.name, ALL_CROSSED), rule.share

    def _told(self) -> None:
        clock = self.machine.clock
        clock.layers += [rows for rows in self._batch if rows]
        clock.spent(dict(zip(PHASES, self._seconds, strict=True)), "packing")
        ctypes.memset(self._batch, 0, ctypes.sizeof(self._batch))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))

    def join(self, other: "NativeWave") -> None:
        """Take in rows that wait at the same layer; the wave is as old as its oldest row."""
        size, more = self.size, other.size
        for place, slot in enumerate(other._active[:more], start=size):
            self._active[place] = slot
        self._view.active_count = size + more
        self._by_slot.update({row.slot: row for row in other.rows})
        self.age = max(self.age, other.age)

    def part(self) -> "NativeWave":
        """All rows that are still climbing, as a wave of their own; what is left here only speaks."""
        other = object.__new__(NativeWave)
        other.machine, other.age, other.spoken = self.machine, self.age, None
        other._make(self.rows)
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
            self.spoken = Spoken.nothing()
            return
        machine.speak(view)
        self._told()
        machine.clock.fallbacks += view.fallbacks
        slots = self._done[:count]
        confidences = machine.confidences[slots].tolist() if machine.record else None
        said = {name: array[:count] for name, array in self._said.items()}

        self.spoken = Spoken(
            [self._by_slot[slot] for slot in slots],
            said["tokens"],
            said["crossing"],
            said["emission"],
            said["executed"],
            [bool(value) for value in said["involuntary"]],
            partial(machine.states, slots),
            partial(machine.logits, slots),
            confidences,
        )
        machine.clock("read")
