"""One progress display for every long step: a bar with time left on a terminal, a plain line now and then elsewhere."""

import sys
import time
from io import TextIOBase
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``; hours appear when there are any."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Counts ``done`` of ``total`` on stderr.

    Args:
        shown: False keeps quiet, for processes other than the first.
        every_s: least seconds between two plain lines.
    """

    def __init__(
        self,
        total: int,
        label: str,
        unit: str = "row",
        done: int = 0,
        shown: bool = True,
        every_s: float = 15.0,
        stream: TextIO | TextIOBase | None = None,
    ) -> None:
        self.total, self.label, self.unit, self.done, self.shown = total, label, unit, done, shown
        self._stream: Any = stream or sys.stderr
        self._every, self._begun, self._first = every_s, time.monotonic(), done
        self._last = float("-inf")
        self._stats: dict[str, str] = {}
        self._bar: Any = None
        if shown and self._stream.isatty():
            self._bar = tqdm(total=total, initial=done, desc=label, unit=unit, file=self._stream, dynamic_ncols=True)

    def update(self, count: int = 1, **stats: float | int | str) -> None:
        """Advance; ``stats`` are shown beside the counts."""
        self.done += count
        self._stats.update({name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in stats.items()})
        if self._bar is not None:
            if stats:
                self._bar.set_postfix(self._stats, refresh=False)
            self._bar.update(count)
        elif self.shown and ((count and self.done >= self.total) or time.monotonic() - self._last >= self._every):
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        elapsed, advanced = self._last - self._begun, self.done - self._first
        left = elapsed / advanced * (self.total - self.done) if advanced else float("nan")
        parts = [f"{self.label}: {self.done}/{self.total} {self.unit}s", f"{duration(elapsed)} gone"]
        if advanced and self.done < self.total:
            parts.append(f"{duration(left)} left")
        parts += [f"{name} {value}" for name, value in self._stats.items()]
        print(", ".join(parts), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A line that does not tear the bar."""
        if not self.shown:
            return
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
