"""Rows that gave their blocks up because older rows needed them, and how they come back as if nothing had happened.

The newest row goes first, so the oldest never does, and it has room in any case: somebody always gets on. A row that
comes back goes on with its next token, and every K and V above an exit is what that exit made of it. ``swap`` keeps a
copy of them on the host. ``replay`` makes them again: the prompt is read, and each position of the answer is taken to
the layer that it spoke from and filled in above it. (At full depth it would leave other K and V behind, and the tokens
to come would change.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from calm.config import Preempt
from calm.policies import SkipSchedule, scheduled_layers

from .prefill import CrossKV
from .requests import Row
from .slots import SlotPool


class Preemption:
    """How rows of one engine lose their blocks and get them back.

    Attributes:
        count: preemptions since the start.
    """

    def __init__(self, how: Preempt, slots: SlotPool, machine: Any) -> None:
        self._how, self._slots, self._machine = how, slots, machine
        self._kept: dict[str, CrossKV] = {}
        self.count = 0

    @property
    def held_bytes(self) -> int:
        """Of K and V that wait on the host."""
        return sum(part.nbytes for keys, values, said, _ in self._kept.values() for part in (*keys, *values, said))

    def victims(self, running: Iterable[Row]) -> Iterable[Row]:
        """Rows that have to go, one after another, until each of the others has room for what it writes next."""
        left = sorted(running, key=lambda row: row.number)
        for row in list(left):
            while row in left and not self._slots.grow(row.slot, row.reach):
                yield left.pop()

    def keep(self, row: Row) -> None:
        """Before its blocks go."""
        self.count += 1
        if self._how is Preempt.swap and row.tokens:
            self._kept[row.id] = self._slots.source_of(row.slot, row.step - 1)

    def has(self, row: Row) -> bool:
        """Whether there is a copy of what the row had."""
        return row.id in self._kept

    def copy(self, row: Row) -> CrossKV:
        """What the row had, for its slot."""
        return self._kept[row.id]

    def back(self, row: Row, slot: int) -> None:
        """After a row's copy, or where there is none its prompt, has been put into a slot again."""
        copied = self._kept.pop(row.id, None) is not None
        if row.tokens:
            self._slots.grow(slot, row.reach)
            if not copied:
                self._rerun(row, slot)

    def forget(self, row: Row) -> None:
        self._kept.pop(row.id, None)

    def _rerun(self, row: Row, slot: int) -> None:
        """A row's answer behind its prompt, but for the last token, which nothing has read yet.

        Positions of a row go through a layer together: they write its K and V before any of them reads, and none sees
        one that comes later. A position that has reached the layer it spoke from keeps that hidden, so that the layers
        above write the backfill; layers that the row's policy never fills in keep nothing of it.
        """
        runner, device = self._machine.runner, self._machine.device
        most, num_layers = self._machine.buckets[-1], self._machine.num_layers
        for begin in range(1, row.step, most):
            steps = range(begin, min(begin + most, row.step))
            at = torch.tensor(steps, device=device)
            slots = torch.full_like(at, slot)
            hidden = runner.embed(torch.tensor([row.tokens[step - 1] for step in steps], device=device), slots, at)
            ran = torch.tensor([_layers_of(row, step, num_layers) for step in steps], device=device)  # (steps, L)
            chosen = [layer + 1 for layer, any_ran in enumerate(ran.any(dim=0).tolist()) if any_ran]
            for layer in chosen:
                out = runner.layer(layer, hidden, slots, at, False)
                hidden = torch.where(ran[:, layer - 1, None], out, hidden)
            if row.fills:
                runner.backfill(hidden, slots, at, torch.full_like(at, chosen[-1]), chosen[-1])


def _layers_of(row: Row, step: int, num_layers: int) -> list[bool]:
    """Which layers 1..L a step ran."""
    if isinstance(row.policy, SkipSchedule):
        chosen = scheduled_layers(row.policy, step, num_layers)
        return [layer in chosen for layer in range(1, num_layers + 1)]
    return [layer <= row.emission[step] for layer in range(1, num_layers + 1)]
