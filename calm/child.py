"""What a process has that this one starts: one thread, no Ctrl-C of its own, and an end when its parent ends."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .environment import ONE_OF_SEVERAL


@contextmanager
def starting() -> Iterator[None]:
    """A child started here has one thread, and leaves Ctrl-C to its parent from its first moment on.

    It inherits the blocked signal. Here a Ctrl-C of this moment comes through as soon as the child is there.
    """
    before = {name: os.environ.get(name) for name in ONE_OF_SEVERAL}
    os.environ.update(ONE_OF_SEVERAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask Linux for this signal when the thread that started us ends, and so its process, however it ends."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signum), 0, 0, 0)
