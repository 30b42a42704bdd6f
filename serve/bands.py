"""Rows that decode by a schedule of layers (SkipDecode, 2307.02628): those that run the same layers go together.

The paper's batches begin together, so that all rows stand at one position. Rows that come and go stand at many, and
only those of one band of positions share their layers: a step takes one band after another.
"""

from collections.abc import Sequence
from typing import Protocol

from calm.policies import SkipSchedule, scheduled_layers

from .lanes import Lanes, spoken
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
        at = self._lanes.at(rows, [0] * len(rows))
        hidden = self._lanes.embed([row.next_input for row in rows], at)
        self._machine.clock("start")
        for layer in layers:
            hidden = self._lanes.layer(layer, hidden, at)
        return spoken(self._machine, rows, hidden, layers[-1], len(layers))
