"""Progress of a calibration: one bar for each decode, which chunks from a cache and rows from a decoder both move."""

from ..progress import Progress


class Bars:
    """Hand ``__call__`` to ``calibrate`` and ``rows`` to the decoder that it calls."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown
        self._what = ""
        self._bar: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` rows of ``what`` are there."""
        if what != self._what or self._bar is None:
            self.close()
            self._what, self._bar = what, Progress(total, what, shown=self.shown and total > 0)
        if done > self._bar.done:
            self._bar.update(done - self._bar.done)
        if done >= total:
            self.close()

    def rows(self, count: int) -> None:
        """The decoder has done ``count`` more rows of the current step."""
        if self._bar is not None:
            self._bar.update(min(count, self._bar.total - self._bar.done))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._what, self._bar = "", None
