"""One request as whoever asked for it sees it: pieces while they come, and an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from calm.errors import CalibrationError, CalmError, ConfigError, DataError

from .errors import QueueFull
from .messages import Ended, Refused, Spoke

REFUSALS: dict[str, type[CalmError]] = {
    each.__name__: each for each in (QueueFull, ConfigError, DataError, CalibrationError)
}


class Stream:
    """An async iterator of ``Spoke``; when it is through, ``ended`` says how. For one reader, in one event loop.

    What a reader has not fetched yet is kept as one ``Spoke``, so a slow one costs no more than its answer. Iterating,
    and ``result``, raise QueueFull, ConfigError, DataError or CalibrationError where the engine refused the request,
    and EngineGone where its process went. A reader whose waiting is cancelled cancels the request.

    Attributes:
        id: of the request.
        ended: its end; None until it came.
    """

    def __init__(self, name: str, abort: Callable[[], None]) -> None:
        self.id = name
        self.ended: Ended | None = None
        self._abort = abort
        self._cancelled = False
        self._error: CalmError | None = None
        self._news = asyncio.Event()
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._layers: list[int] = []

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Spoke:
        while not self._tokens and not self._text:
            if self.over:
                self._check()
                raise StopAsyncIteration
            await self._wait()
        return self._fetch()

    async def result(self) -> Ended:
        """The end, when it has come; its text is all that was not fetched before."""
        while not self.over:
            await self._wait()
        self._check()
        assert self.ended is not None
        return replace(self.ended, text=self._fetch().text + self.ended.text)

    def cancel(self) -> None:
        """Have the engine forget the request, at once; an ``Ended`` of status cancelled follows."""
        if not self.over and not self._cancelled:
            self._cancelled = True
            self._abort()

    async def aclose(self) -> None:
        """Nobody reads on: cancel."""
        self.cancel()

    @property
    def over(self) -> bool:
        """Whether nothing follows but what was not fetched yet."""
        return self.ended is not None or self._error is not None

    # from the engine

    def take(self, event: Spoke | Ended | Refused) -> None:
        """What the engine said of this request."""
        match event:
            case Spoke():
                self._text.append(event.text)
                self._tokens += event.tokens
                self._layers += event.layers
            case Ended():
                self.ended = event
            case Refused():
                self._error = REFUSALS.get(event.kind, CalmError)(event.message)
        self._news.set()

    def lose(self, error: CalmError) -> None:
        """There will be no end."""
        self._error = error
        self._news.set()

    def _fetch(self) -> Spoke:
        spoke = Spoke(self.id, "".join(self._text), tuple(self._tokens), tuple(self._layers))
        self._text, self._tokens, self._layers = [], [], []
        return spoke

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._news.clear()
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
