"""Where the time of a step goes, and what was in it."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from calm.config import BatchRule

# what is done to tensors, on the device; the rest is the host's own
RUNNER_PHASES = ("start", "layers", "checks", "packing", "head", "read", "backfill", "prefill", "slots")


@dataclass(frozen=True)
class StepRecord:
    """One iteration of the engine.

    Attributes:
        rows: that were running when it began.
        tokens: emitted.
        rule: that its wave followed; None when nothing ran.
        layers: batch size (a bucket) of each layer that ran, in order.
        parked: rows that wait for company after it.
        admitted: requests that joined before it.
        encoder_calls: of the prefill.
        fallbacks: looks at the vocabulary that the screened head had to leave to the full one.
        seconds: by phase; ``host`` is what no phase of the runner took.
    """

    rows: int
    tokens: int
    rule: BatchRule | None
    layers: tuple[int, ...]
    parked: int
    admitted: int
    encoder_calls: int
    fallbacks: int
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
    ``now`` says what time it is, in seconds; ``time.thread_time`` leaves out what others took of a busy machine, where
    torch has one thread.
    """

    now: Callable[[], float] = time.perf_counter
    history: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=4096))
    seconds: dict[str, float] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)
    fallbacks: int = 0
    steps: int = 0
    tokens: int = 0
    _last: float = 0.0

    def begin(self) -> None:
        self.seconds, self.layers, self.fallbacks = {}, [], 0
        self._last = self.now()

    def __call__(self, phase: str) -> None:
        now = self.now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def spent(self, seconds: Mapping[str, float], rest: str) -> None:
        """Of what passed since the last call, ``seconds`` went to these phases and what is left over to ``rest``."""
        for phase, value in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + value
            self._last += value
        self(rest)

    def layer(self, batch: int) -> None:
        """A layer ran on so many rows."""
        self.layers.append(batch)
        self("layers")

    def end(
        self, rows: int, tokens: int, rule: BatchRule | None, parked: int, admitted: int, encoder_calls: int
    ) -> StepRecord:
        self("host")
        seconds, self.seconds = self.seconds, {}  # what is asked between two steps belongs to neither
        ran, undecided = tuple(self.layers), self.fallbacks
        record = StepRecord(rows, tokens, rule, ran, parked, admitted, encoder_calls, undecided, seconds)
        self.history.append(record)
        self.steps += 1
        self.tokens += tokens
        return record
