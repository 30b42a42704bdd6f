"""Rounds of rows that draft, under the native runner: one call for drafting and verifying (see draft.h).

A product's rows do not depend on how many there are, so the words have the very bits of full depth.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from calm.drafting import Draft

from ..exits import MEASURES
from ..requests import Row
from ..rounds import Round, end_of_draft
from .machine import NativeMachine
from .views import INT, PLACES, STAGES, DraftView

PHASES = {"draft_layers": "layers", "draft_head": "checks", "verify": "layers", "words": "head"}


class NativeRounds:
    """Rounds of at most ``most`` rows."""

    def __init__(self, machine: NativeMachine, eos: int, most: int) -> None:
        self._machine, self._eos, self.verify_s = machine, eos, 0.0
        self._slots, self._room, self._positions, self._guesses = ((INT * most)() for _ in range(4))
        self._drafted, self._words = ((INT * (most * PLACES))() for _ in range(2))
        self._batch = (INT * (machine.num_layers * PLACES))()
        self._seconds = (ctypes.c_double * len(STAGES))()
        self._view = DraftView()
        arrays: dict[str, Any] = dict(
            slots=self._slots, room=self._room, positions=self._positions, guesses=self._guesses
        )
        arrays |= dict(drafted=self._drafted, words=self._words, batch=self._batch, seconds=self._seconds)
        for name, array in arrays.items():
            setattr(self._view, name, ctypes.addressof(array))

    def __call__(self, rows: Sequence[Row], draft: Draft) -> list[Round]:
        """Raise MemoryError."""
        found: list[Round] = []
        for ends in sorted({end_of_draft(row, self._eos) for row in rows}):
            found += self._run([row for row in rows if end_of_draft(row, self._eos) == ends], draft, ends)
        return found

    def _run(self, rows: list[Row], draft: Draft, ends: int) -> list[Round]:
        machine, view = self._machine, self._view
        for i, row in enumerate(rows):
            machine.step[row.slot], machine.token[row.slot] = row.step, row.next_input
            self._slots[i], self._room[i] = row.slot, row.limit - row.step
        view.count, view.layer, view.length, view.eos = len(rows), draft.layer, draft.length, ends
        view.measure = -1 if draft.measure is None else MEASURES.index(draft.measure)
        view.threshold, view.ran, view.fallbacks = draft.threshold, 0, 0
        view.cpu_time = machine.clock.now is time.thread_time
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        machine.clock("start")
        machine.speculate(view)
        machine.clock.layers += self._batch[: view.ran]
        machine.clock.fallbacks += view.fallbacks
        seconds = dict(zip(STAGES, self._seconds, strict=True))
        self.verify_s = seconds["verify"]
        for stage, spent in seconds.items():
            machine.clock.spent({PHASES[stage]: spent}, "read")
        return [self._round(row, i * PLACES, i) for i, row in enumerate(rows)]

    def _round(self, row: Row, first: int, i: int) -> Round:
        return Round(
            row,
            self._drafted[first : first + self._guesses[i]],
            self._words[first : first + self._positions[i]],
        )
