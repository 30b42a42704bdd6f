"""Which decoder layers run at which generated position: SkipDecode's schedule and its baseline's.

SkipDecode (Del Corro et al., arXiv 2307.02628), sections 2.3 and 2.4: the prompt runs every layer; a generated token
runs fewer the later it stands, the same number in every row; some warm-up layers at the bottom, the rest at the top.
``side=bottom`` is the paper's multi-layer exit network: the first layers alone, and the word from the last of them.

Each token runs a subset of the layers of every token before it, so attention never meets a position without K and V.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from typing import Any

from .errors import ConfigError


class Decay(str, Enum):
    """How the number of layers falls from the first generated position to the last."""

    linear = "linear"
    power = "power"


class Side(str, Enum):
    """Where the layers are that run: warm-up and top (SkipDecode), or the first ones alone (multi-layer exit)."""

    top = "top"
    bottom = "bottom"


@dataclass(frozen=True, slots=True)
class LayerSchedule:
    """Layers by position. Positions count generated tokens as they are read again, from 0.

    Attributes:
        max_layers, min_layers: at position 0, and at ``length``, which no token reaches; equal ones are a fixed depth.
        length: N, the longest answer in tokens; the paper's sequence length less its prompt. Further positions have
            ``min_layers``.
        warmup_layers: at the bottom, among those counted; of side ``top``.
        power: exponent of ``decay=power``, > 0.

    Raises:
        ConfigError: the numbers rise with the position, or are out of range.
    """

    max_layers: int
    min_layers: int
    length: int
    warmup_layers: int = 1
    decay: Decay = Decay.linear
    power: float = 1.0
    side: Side = Side.top

    def __post_init__(self) -> None:
        if self.min_layers < 1 or self.length < 1 or self.warmup_layers < 0:
            raise ConfigError(
                f"skip_schedule needs min_layers and length of at least 1 and warmup_layers of at least 0, got "
                f"{self.min_layers}, {self.length} and {self.warmup_layers}"
            )
        if self.min_layers > self.max_layers:
            raise ConfigError(
                f"skip_schedule is not monotone: it rises from max_layers={self.max_layers} to "
                f"min_layers={self.min_layers}, and later tokens would read layers that earlier ones have not run; "
                "give max_layers >= min_layers"
            )
        if self.side is Side.top and self.warmup_layers > self.min_layers:
            raise ConfigError(
                f"skip_schedule: warmup_layers={self.warmup_layers} are more than min_layers={self.min_layers}, which "
                f"counts them; give at most {self.min_layers}"
            )
        if not 0 < self.power < float("inf"):
            raise ConfigError(f"skip_schedule.power must lie in (0, inf), got {self.power}")

    def check_depth(self, num_layers: int) -> None:
        """Raise ConfigError where the model has fewer layers than the schedule asks for."""
        if self.max_layers > num_layers:
            raise ConfigError(
                f"skip_schedule: max_layers={self.max_layers} exceeds the model's {num_layers} decoder layers; give at "
                f"most {num_layers}"
            )

    def count(self, position: int) -> int:
        """Layers at a generated position: the paper's formula (section 2.3), rounded to the nearest, halves up.

        ``linear``: (1 - t) max + t min with t = position / length. ``power``: (1 + position)^-power, stretched to
        have the same ends; the paper names such a decay without a formula.
        """
        if position >= self.length:
            return self.min_layers
        span = self.max_layers - self.min_layers
        if self.decay is Decay.linear:  # in whole numbers, so that halves are halves
            return self.max_layers - (2 * span * position + self.length - 1) // (2 * self.length)
        fallen, whole = (math.expm1(-self.power * math.log1p(each)) for each in (position, self.length))
        return self.min_layers + int(span * (1.0 - fallen / whole) + 0.5)

    def layers(self, step: int, num_layers: int) -> tuple[int, ...]:
        """Layers (1..L, ascending) that a decode step runs.

        Step 0 reads the prompt's last token (the start token of an encoder-decoder), so it runs them all; step s reads
        the token of position s - 1.
        """
        self.check_depth(num_layers)
        if step == 0:
            return tuple(range(1, num_layers + 1))
        count = self.count(step - 1)
        low = count if self.side is Side.bottom else self.warmup_layers
        return (*range(1, low + 1), *range(num_layers - count + low + 1, num_layers + 1))

    def reach(self, steps: int, num_layers: int) -> tuple[int, ...]:
        """For each layer 1..L, how many of so many steps run it: always the first ones."""
        active = [self.layers(step, num_layers) for step in range(steps)]
        check_monotone(active)
        runs = Counter(chain.from_iterable(active))
        return tuple(runs[layer] for layer in range(1, num_layers + 1))

    def mean_layers(self, positions: int | None = None) -> float:
        """Mean over the first positions, by default all ``length`` of them: the paper's target average."""
        counted = [self.count(position) for position in range(positions or self.length)]
        return sum(counted) / len(counted)

    def to_json(self) -> dict[str, Any]:
        return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LayerSchedule":
        """Raise ConfigError for values that are no schedule."""
        try:
            return cls(**{**values, "decay": Decay(values["decay"]), "side": Side(values["side"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"skip_schedule: these are no settings of a schedule: {error!r}") from None


def check_monotone(active: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless each step's layers are among those of the step before: what attention has to read."""
    for step, (before, now) in enumerate(zip(active, active[1:], strict=False), start=1):
        if unread := sorted(set(now) - set(before)):
            raise ConfigError(
                f"skip_schedule is not monotone: step {step} runs layers {unread}, which step {step - 1} has not run, "
                "so their keys and values would be missing"
            )
