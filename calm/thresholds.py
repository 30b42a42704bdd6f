"""Thresholds as a function of the position in the answer: constant and decaying.

CALM, eq. 5: lambda'(t) = clip01(0.9 lambda + 0.1 exp(-tau t / N)), t = 0 at the first generated token and N the
artifact's maximum length whatever a request asks. The released t5x code uses lambda (0.9 + 0.1 exp(-tau t / N)).
"""

import math
import struct
from dataclasses import dataclass

from .config import Measure, Schedule
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class ThresholdSchedule:
    """A threshold, or one per layer 1..L-1, with its decay. A row exits when confidence >= threshold_at(step).

    A threshold >= 1 turns exits off exactly, whatever the confidence: the decay does not touch it.
    """

    threshold: float | tuple[float, ...]
    kind: Schedule = Schedule.constant
    tau: float = 4.0
    length: int = 128

    def __post_init__(self) -> None:
        values = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        for value in values:
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"threshold must lie in [0, 1], got {value}")
        if self.kind is Schedule.auto:
            raise ConfigError("schedule 'auto' must be resolved on dev before decoding; choose constant or decaying")
        if self.length < 1:
            raise ConfigError(f"threshold length N must be at least 1, got {self.length}")

    def at(self, step: int, layer: int) -> float:
        """What a confidence after ``layer`` (1..L-1) must reach at ``step`` (0 = first generated).

        Infinity where the threshold is >= 1: not even a saturated confidence exits there. Else rounded to fp32, in
        which confidences are: so a tie is a tie in every decoder.
        """
        value = self.threshold[layer - 1] if isinstance(self.threshold, tuple) else self.threshold
        return math.inf if value >= 1.0 else _fp32(self._decayed(value, step))

    def threshold_at(self, step: int) -> float | tuple[float, ...]:
        """The whole schedule at one step: a number, or one per layer."""
        if isinstance(self.threshold, tuple):
            return tuple(self._decayed(value, step) for value in self.threshold)
        return self._decayed(self.threshold, step)

    def _decayed(self, value: float, step: int) -> float:
        if value >= 1.0 or self.kind is Schedule.constant:
            return value
        decay = math.exp(-self.tau * step / self.length)
        if self.kind is Schedule.decaying_released:
            return value * (0.9 + 0.1 * decay)
        return min(1.0, max(0.0, 0.9 * value + 0.1 * decay))

    @property
    def exits_off(self) -> bool:
        values = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        return all(value >= 1.0 for value in values)


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def measure_schedule(measure: Measure, kind: Schedule) -> Schedule:
    """``state`` never decays (CALM section 5: tau = 0 for state); the others as asked."""
    return Schedule.constant if measure is Measure.state else kind
