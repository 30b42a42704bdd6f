"""What the HTTP server needs of an engine that runs elsewhere. Times are seconds of ``time.perf_counter``."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ..messages import Batch, Ended, Load, ModelInfo, Spoke
from ..options import RequestOptions

Source = str | tuple[int, ...]


class AnswerStream(Protocol):
    """One request's answer as it comes: iterate over what it says, then read ``ended``.

    Iterating raises QueueFull, ConfigError, DataError or CalibrationError where the engine does not take the request,
    EngineGone where its process died, Draining where it takes no more.
    """

    @property
    def ended(self) -> Ended | None: ...

    def __aiter__(self) -> AsyncIterator[Spoke]: ...

    def cancel(self) -> None:
        """Forget the request wherever it is; harmless when it is over."""


class ServedEngine(Protocol):
    """An engine in a process of its own.

    Attributes:
        state: loading, ready, draining, hung, dead.
        info: of its model; None before it was ready for the first time.
        load: where it stands.
        on_batch: called with everything that a step brought.
    """

    on_batch: Callable[[Batch], None] | None

    @property
    def state(self) -> str: ...

    @property
    def info(self) -> ModelInfo | None: ...

    @property
    def load(self) -> Load: ...

    async def start(self) -> None: ...

    async def ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            EngineGone: its process ended and no other follows.
            CalmError: its model cannot be served.
        """

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing more, finish what is there within so many seconds, leave. Once more, also meanwhile: at once."""

    def submit(
        self,
        source: Source,
        options: RequestOptions,
        *,
        deadline: float = 0.0,
        id: str | None = None,  # noqa: A002
        pieces: bool = True,
    ) -> AnswerStream: ...
