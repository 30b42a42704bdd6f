"""Where the time of a step goes, and what was in it."""

import time
from collections import deque
from dataclasses import dataclass, field

RUNNER_PHASES = ("start", "layers", "checks", "head", "read", "backfill", "prefill")


@dataclass(frozen=True)
class StepRecord:
    """One iteration of the engine.

    Attributes:
        rows: that were running when it began.
        tokens: emitted.
        layers: batch size of each layer that ran, in order.
        parked: rows that wait for company after it.
        admitted: requests that joined before it.
        encoder_calls: of the prefill.
        seconds: by phase; ``host`` is what no phase of the runner took.
    """

    rows: int
    tokens: int
    layers: tuple[int, ...]
    parked: int
    admitted: int
    encoder_calls: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def outside_runner(self) -> float:
        """Share of the step that was spent on anything but tensors."""
        return sum(s for phase, s in self.seconds.items() if phase not in RUNNER_PHASES) / max(self.total, 1e-12)


@dataclass
class Clock:
    """Tells phases apart: what passed since the last call belongs to the phase that is named now.

    On a GPU the phases are those of the host: time on the device shows up in ``read``, where the host waits for it.
    """

    history: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=4096))
    seconds: dict[str, float] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    _last: float = 0.0

    def begin(self) -> None:
        self.seconds, self.layers = {}, []
        self._last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self, rows: int, tokens: int, parked: int, admitted: int, encoder_calls: int) -> StepRecord:
        self("host")
        record = StepRecord(rows, tokens, tuple(self.layers), parked, admitted, encoder_calls, self.seconds)
        self.history.append(record)
        self.steps += 1
        self.tokens += tokens
        return record
