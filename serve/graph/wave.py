"""A wave under the graph runner: rows that take one step together on the device."""

from collections.abc import Sequence
from typing import Any

from calm.rules import Rule

from ..requests import Row
from ..wave import Spoken
from .machine import GraphMachine


class GraphWave:
    """Nobody is parked on a device, so a wave is one call."""

    def __init__(self, machine: GraphMachine, rows: Sequence[Row], bucket: int | None = None) -> None:
        self._machine, self._rows = machine, rows
        self._bucket = bucket or machine.bucket(len(rows))
        self.spoken: Spoken | None = None

    def climb(self, rule: Rule, parked: list[Any], patient: bool = True) -> None:
        """One step. Rows that are taken up by themselves, after one raised, are told at once."""
        self.spoken = self._machine.step(rule, self._rows, self._bucket, alone=not patient)
