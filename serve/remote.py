"""An engine in a process of its own, for an asyncio server: requests in, streams out, and somebody who watches it.

    engine = RemoteEngine("runs/demo/model", EngineOptions(), name="demo")
    await engine.start()
    await engine.ready()
    async for piece in engine.submit("a text", RequestOptions(tolerance=0.05)):
        print(piece.text, end="")
    await engine.stop(drain_seconds=10)

Needs neither torch nor the HTTP part.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from calm.errors import CalmError, ConfigError

from .errors import Draining, EngineGone
from .link import Link, Target
from .messages import Abort, Batch, Ended, Failed, Load, Log, ModelInfo, Ready, Refused, Stop, Submit
from .options import EngineOptions, RequestOptions
from .streams import Stream
from .worker import Settings, work

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "dead", "hung"]
TICK_S = 0.1
ABORTED_S = 2.0  # for the last requests to end after they were aborted
LEFT_S = 5.0  # for a process to end by itself
IDLE = Load(0.0, 0, 0, 0, 0, 0, 0, 0, 0)


class RemoteEngine:
    """Starts, watches and ends an engine's process, and knows whose answer is whose. For one event loop.

    Args:
        folder: of the model.
        options: of the engine.
        name: as requests call the model.
        device, dtype: where it decodes and in what arithmetic (``float32`` or ``torch.float32``).
        hung_after: seconds without a word from an engine that is up, after which it counts as hung and is killed;
            more where its own measurements say that a step may take longer.
        restarts: how often a process that has ended or hung is started anew, over the life of this object.
        target: what the process does; tests give their own.

    Attributes:
        state: loading, ready, draining (``stop`` was called), hung, dead.
        info: what the engine said of its model; None before it was up.
        load: where it stood after its last step; a new process begins at 0.
        on_batch: called with every batch, for metrics.
    """

    def __init__(
        self,
        folder: str | Path,
        options: EngineOptions | None = None,
        *,
        name: str,
        device: object = "cpu",
        dtype: object = "float32",
        hung_after: float = 2.0,
        restarts: int = 0,
        target: Target = work,
    ) -> None:
        dtype_name = str(dtype).removeprefix("torch.")
        self._settings = Settings(str(folder), options or EngineOptions(), name, str(device), dtype_name)
        self._hung_after, self._restarts, self._target = hung_after, restarts, target
        self._longest_step = 0.0
        self.state: State = "dead"
        self.info: ModelInfo | None = None
        self.load: Load = IDLE
        self.on_batch: Callable[[Batch], None] | None = None
        self._streams: dict[str, Stream] = {}
        self._link: Link | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure: Failed | None = None
        self._stopping = False
        self._silent = 0.0
        self._turn = asyncio.Event()

    # life

    async def start(self) -> None:
        """Start the process; ``ready`` waits for it.

        Raises:
            OSError: the system has none to give.
            ConfigError: it was started before.
        """
        if self._keeper is not None:
            raise ConfigError("an engine is started once; make another RemoteEngine")
        self._become("loading")
        try:
            link = await self._new_link()
        except OSError:
            self._become("dead")
            raise
        self._keeper = asyncio.create_task(self._keep(link), name="engine")

    async def ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            CalmError: the model cannot be served; the line says why.
            EngineGone: the process ended, and no other follows.
            Draining: ``stop`` was called.
        """
        while self.state != "ready":
            if self._failure is not None:
                raise CalmError(self._failure.message)
            if self._stopping:
                raise Draining("the engine is about to stop")
            if self._keeper is None or self._keeper.done():
                raise self._gone()
            await self._turned()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, give those that run so many seconds, abort the rest; then the process is gone."""
        self._stopping = True
        if self.state == "ready":
            self._become("draining")
        if self.state == "draining":
            await self._emptied(drain_seconds)
            for stream in list(self._streams.values()):
                stream.cancel()
            await self._emptied(ABORTED_S)
        if self._keeper is None or self._link is None:
            return
        if self.state == "draining":
            self._link.send(Stop(drain=False))
            await asyncio.wait([self._keeper], timeout=LEFT_S)
        self._link.kill()
        await asyncio.wait([self._keeper])

    # requests

    def submit(
        self,
        source: str | Sequence[int],
        options: RequestOptions | None = None,
        *,
        deadline: float = 0.0,
        id: str | None = None,  # noqa: A002
        pieces: bool = True,
    ) -> Stream:
        """Hand a request over; what the engine says of it comes through the stream.

        Args:
            source: its text, or its ids (EOS last).
            deadline: time.perf_counter() when it is given up wherever it is; 0: never.
            id: unique among those that are not over; None makes one.
            pieces: False where only the end is read: the stream then says nothing before it, which costs less.

        Raises:
            Draining: ``stop`` was called.
            EngineGone: the engine is not ready.
            ConfigError: the id is in use.
        """
        if self._stopping:
            raise Draining("the engine takes no more requests: it is about to stop")
        if self.state != "ready":
            raise self._gone()
        name = uuid.uuid4().hex if id is None else id
        if name in self._streams:
            raise ConfigError("the request id is in use; give another")
        given: Any = source if isinstance(source, str | bytes) else tuple(source)
        self._send(Submit(name, given, options or RequestOptions(), time.perf_counter(), deadline, pieces))
        stream = self._streams[name] = Stream(name, partial(self._send, Abort(name)))
        return stream

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._link.send(message)

    # what the process says

    def _took(self, message: Any) -> None:
        self._silent = 0.0
        match message:
            case Batch():
                self._took_batch(message)
            case Ready(info, longest):
                self.info, self._longest_step = info, longest
                if not self._stopping:
                    self._become("ready")
            case Log(name, level, line):
                logging.getLogger(name).log(level, "%s", line)
            case Failed():
                logger.error("the engine cannot be made: %s", message.message)
                self._failure = message

    def _took_batch(self, batch: Batch) -> None:
        self.load = batch.load
        for event in batch.events:
            over = isinstance(event, Ended | Refused)
            stream = self._streams.pop(event.id, None) if over else self._streams.get(event.id)
            if stream is not None:
                stream.take(event)
        if not self._streams:
            self._turn.set()
        if self.on_batch is not None:
            try:
                self.on_batch(batch)
            except Exception:
                logger.exception("the hook for batches raised")

    # watching

    async def _keep(self, link: Link) -> None:
        """The lives of the process, one after another."""
        left = self._restarts
        try:
            while await self._lived(link) and left:
                left -= 1
                self._become("loading")
                link = await self._new_link()
        except OSError as error:
            logger.error("the engine's process cannot be started anew (%s)", error)
        finally:
            self._lose("dead")

    async def _lived(self, link: Link) -> bool:
        """One life, from its start to its end. Whether another may follow."""
        if self._stopping:
            link.kill()
        try:
            await self._watch(link)
            self._lose("dead" if link.lost.is_set() else "hung")
        finally:
            if not link.lost.is_set():
                link.kill()
        code = await link.end(LEFT_S)
        if not self._stopping:
            logger.error("the engine's process %s ended (exit code %s)", link.pid, code)
        return not self._stopping and self._failure is None

    async def _watch(self, link: Link) -> None:
        """Until the process is gone, or has said nothing for too long.

        Time counts by ticks of this loop: while the loop itself stands still, nobody else is to blame.
        """
        self._silent = 0.0
        while not link.lost.is_set():
            try:
                await asyncio.wait_for(link.lost.wait(), TICK_S)
            except TimeoutError:
                if self.state == "loading":
                    continue
                self._silent += TICK_S
                if self._silent >= max(self._hung_after, self._longest_step):
                    return

    def _lose(self, state: State) -> None:
        """All open requests end here."""
        self._become(state)
        self.load = replace(self.load, running=0, waiting=0, parked=0)
        streams, self._streams = self._streams, {}
        if streams:
            logger.error("%d requests are lost: the engine is %s", len(streams), state)
        for stream in streams.values():
            stream.lose(self._gone())

    async def _new_link(self) -> Link:
        self.load = IDLE
        self._link = await Link.start(self._target, self._settings, self._took)
        return self._link

    def _gone(self) -> EngineGone:
        said = {"loading": "is not ready yet", "hung": "hangs", "draining": "is about to stop"}
        return EngineGone(f"the engine {said.get(self.state, 'has ended')}; try again later")

    # changes

    def _become(self, state: State) -> None:
        self.state = state
        self._turn.set()

    async def _turned(self) -> None:
        """Wait for a change of state, or for the last stream's end."""
        self._turn.clear()
        await self._turn.wait()

    async def _emptied(self, seconds: float) -> None:
        """Until nothing is open, for so long at most."""
        try:
            async with asyncio.timeout(seconds):
                while self._streams:
                    await self._turned()
        except TimeoutError:
            pass
