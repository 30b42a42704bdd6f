"""Bands of rows with a schedule of layers, under the native runner."""

from collections.abc import Sequence

from ..requests import Row
from ..wave import Spoken
from .machine import NativeMachine
from .wave import NativeWave


class NativeBands:
    """Each band is a wave that is told its layers."""

    def __init__(self, machine: NativeMachine) -> None:
        self._machine = machine

    def __call__(self, rows: Sequence[Row], layers: Sequence[int]) -> Spoken:
        """Raise MemoryError."""
        return NativeWave(self._machine, rows).follow(layers)
