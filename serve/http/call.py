"""All requests of one HTTP call on their way through the engine: what any of them says, in the order in which it comes.

A call succeeds or fails as a whole: where one request is refused or fails the others are cancelled.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from uuid import uuid4

from ..messages import Ended, Spoke
from ..requests import Status
from .backend import AnswerStream, ServedEngine
from .errors import ApiError, from_engine
from .logs import log_failure
from .plan import Job

Event = tuple[Job, Spoke | Ended]
CUT_OFF = ("engine_gone", "cancelled")  # codes of errors that only an engine that leaves or dies brings about


class Call:
    """Submits on entering, and forgets on leaving whatever is not over.

    Args:
        jobs: at least one.
        timeout_s: until every one of them has to be over.
        pieces: what they say is wanted as it comes; else each tells all of it with its end.
        forgotten: called with the number of requests that were cancelled on leaving.

    Attributes:
        name: of the call, unique.
        created: when, in seconds since 1970.
        failure: what the call failed with, as soon as it is known.
    """

    def __init__(
        self,
        engine: ServedEngine,
        jobs: Sequence[Job],
        timeout_s: float,
        pieces: bool,
        forgotten: Callable[[int], None],
    ) -> None:
        self.name = uuid4().hex
        self.created = int(time.time())
        self.failure: ApiError | None = None
        self._engine, self._jobs, self._timeout_s, self._forgotten = engine, jobs, timeout_s, forgotten
        self._pieces = pieces
        self._open: dict[int, AnswerStream] = {}
        self._readers: list[asyncio.Task[None]] = []
        # None wakes up for a failure; no longer than the answers are, however slow their reader
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    async def __aenter__(self) -> "Call":
        """Raises ApiError where the engine refuses at once."""
        deadline = time.perf_counter() + self._timeout_s
        for k, job in enumerate(self._jobs):
            try:
                name = f"{self.name}-{k}"
                self._open[k] = self._engine.submit(
                    job.source, job.options, deadline=deadline, id=name, pieces=self._pieces
                )
            except Exception as error:
                self._forget()
                raise self._told(error, job) from None
        self._readers = [asyncio.create_task(self._read(k, job)) for k, job in enumerate(self._jobs)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def events(self) -> AsyncIterator[Event]:
        """What the requests say, and the end of each. Raises ApiError as soon as one of them fails."""
        left = len(self._jobs)
        while left:
            event = await self._events.get()
            if self.failure is not None:
                raise self.failure
            assert event is not None
            left -= isinstance(event[1], Ended)
            yield event

    async def _read(self, k: int, job: Job) -> None:
        stream = self._open[k]
        try:
            async for spoke in stream:
                self._events.put_nowait((job, spoke))
            ended = stream.ended
            assert ended is not None
        except Exception as raised:
            self._fail(self._told(raised, job))
        else:
            error = self._ending(ended, job)
            if error is None:
                self._events.put_nowait((job, ended))
            else:
                self._fail(error)
        del self._open[k]

    def _fail(self, error: ApiError) -> None:
        self.failure = self.failure or error
        self._events.put_nowait(None)

    def _ending(self, ended: Ended, job: Job) -> ApiError | None:
        """The error that an end is; None for an answer."""
        if ended.expired:
            return timed_out(self._timeout_s)
        if ended.status is Status.finished:
            return None
        if ended.status is Status.failed:
            log_failure(f"call {self.name}: the engine failed on {job.prompt}: {ended.error}")
            said = f"the engine failed on {job.prompt}; other requests are not affected, and the server's log says why"
            return ApiError(500, said, param=job.prompt, code="engine_failed")
        return ApiError(503, "the request was cancelled by the server; send it again", code="cancelled")

    def _told(self, error: Exception, job: Job) -> ApiError:
        told = from_engine(error, job.prompt)
        if told.status == 500:
            log_failure(f"call {self.name}: submitting {job.prompt} failed", error)
        return told

    def _forget(self) -> None:
        for stream in self._open.values():
            stream.cancel()
        if self._open:
            self._forgotten(len(self._open))


def timed_out(timeout_s: float) -> ApiError:
    said = (
        f"the answer was not finished within {timeout_s:g} s; ask for fewer tokens or choices, or send it again later"
    )
    return ApiError(504, said)
