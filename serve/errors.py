"""What a request or a server may run into beside what calm.errors names."""

from calm.errors import CalmError


class QueueFull(CalmError, RuntimeError):
    """The engine has as many waiting requests as it takes; try again later."""


class EngineGone(CalmError, RuntimeError):
    """The engine's process is not there to answer: it has ended, hangs, or is not ready yet."""


class Draining(CalmError, RuntimeError):
    """The engine takes no more requests: it is about to stop."""


class CaptureError(CalmError, RuntimeError):
    """The device does not record a step as a graph, which is no row's doing."""
