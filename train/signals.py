"""SIGTERM and SIGINT: save, then leave with 128 + the signal's number; a second one leaves at once."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_WITHIN_S = 0.5  # a launcher and the terminal may both pass on one Ctrl-C


class Stopped(SystemExit):
    """The run ends because a signal asked for it. No ``except Exception`` on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class Signals:
    """Inside ``deferred()`` a signal is only remembered, for the loop to act on between two steps."""

    def __init__(self) -> None:
        self.received = 0
        self._first = 0.0
        self._deferred = False

    def install(self) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._handle)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.received:
            if time.monotonic() - self._first >= SAME_WITHIN_S:
                os._exit(128 + signum)
            return
        self.received, self._first = signum, time.monotonic()
        name = signal.Signals(signum).name
        if not self._deferred:
            raise Stopped(signum)
        sys.stderr.write(f"{name}: saving a checkpoint, then leaving; once more to leave at once\n")
        sys.stderr.flush()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        if self.received:
            raise Stopped(self.received)
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
