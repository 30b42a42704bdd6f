"""Rows that decode by a schedule of layers (SkipDecode, 2307.02628): those that run the same layers go together.

The paper's batches begin together, so that all rows stand at one position. Rows that come and go stand at many, and
only those of one band of positions share their layers: a step takes one band after another.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from calm.policies import SkipSchedule, scheduled_layers

from .heads import HeadState
from .lanes import Lanes
from .requests import Row
from .wave import Machine, Spoken


class Bands(Protocol):
    """Takes rows through these layers (1..L, ascending) and no others, to their words; nothing is filled in."""

    def __call__(self, rows: Sequence[Row], layers: Sequence[int]) -> Spoken: ...


def bands_of(rows: Sequence[Row], num_layers: int) -> dict[tuple[int, ...], list[Row]]:
    """Rows with a schedule, by the layers of their next token; the fewest first."""
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        assert isinstance(row.policy, SkipSchedule)
        found.setdefault(scheduled_layers(row.policy, row.step, num_layers), []).append(row)
    return dict(sorted(found.items(), key=lambda band: (len(band[0]), band[0])))


class EagerBands:
    """Bands on a runner of plain torch."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._lanes = machine, Lanes(machine)

    def __call__(self, rows: Sequence[Row], layers: Sequence[int]) -> Spoken:
        machine, count = self._machine, len(rows)
        at = self._lanes.at(rows, [0] * count)
        hidden = self._lanes.embed([row.next_input for row in rows], at)
        machine.clock("start")
        for layer in layers:
            hidden = self._lanes.layer(layer, hidden, at)
        live = torch.arange(hidden.shape[0], device=hidden.device) < count
        state = HeadState(None, live)
        tokens = machine.head.emit(hidden, torch.zeros_like(live), state)[:count].tolist()
        machine.clock.fallbacks += state.fallbacks
        machine.clock("head")
        last, nothing = [layers[-1]] * count, [float("nan")] * machine.num_layers
        return Spoken(
            list(rows),
            tokens,
            crossing=last,
            emission=last,
            executed=[len(layers)] * count,
            involuntary=[False] * count,
            states=lambda: hidden,
            logits=lambda: machine.runner.logits(hidden),
            confidences=[nothing] * count if machine.record else None,
        )
