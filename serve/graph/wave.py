"""A wave under the graph runner: rows that take one step together on the device."""

from collections.abc import Sequence
from typing import Any

from calm.errors import ConfigError
from calm.rules import Rule

from ..requests import Row
from ..wave import Spoken
from .machine import GraphMachine


class GraphWave:
    """Nobody is parked on a device, so a wave is one call.

    Raises:
        ConfigError: a rule under which rows wait for company.
    """

    layer = 0

    def __init__(self, machine: GraphMachine, rule: Rule, rows: Sequence[Row], bucket: int | None = None) -> None:
        if rule.waits:
            raise ConfigError("rule=rebatch parks rows between layers, which a captured step cannot; choose compact")
        self.machine, self.rows, self.age = machine, list(rows), 0
        self._bucket = bucket or machine.bucket(len(self.rows))
        self.spoken: Spoken | None = None

    @property
    def size(self) -> int:
        return len(self.rows)

    def climb(self, rule: Rule, parked: list[Any], patient: bool = True) -> None:
        """One step. Rows that are taken up by themselves, after one raised, are told at once."""
        self.spoken = self.machine.step(rule, self.rows, self._bucket, alone=not patient)
