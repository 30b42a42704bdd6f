"""A scripted engine: what it answers is known beforehand, and it stops and goes on when a test says so."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from calm.errors import DataError
from calm.serve_config import ServeConfig
from serve.errors import Draining, EngineGone, QueueFull
from serve.http.backend import Source
from serve.messages import Batch, Ended, Load, ModelInfo, Refused, Silent, Spoke
from serve.options import RequestOptions
from serve.requests import Reason, Status, Timing

NAME = "demo"
INFO = ModelInfo(
    name=NAME,
    num_layers=8,
    exit_layers=(1, 2, 3, 4, 5, 6, 7),
    vocab_size=100,
    max_source=16,
    max_target=64,
    max_batch=4,
    tolerances={"risk": (0.05, 0.1)},
    measure="softmax",
    about={"rule": "own"},
    max_drafted=15,
)
POLL_S = 0.002
GAP_S = 0.003  # between tokens of answers that are told whole


def config_of(**settings: Any) -> ServeConfig:
    return ServeConfig(**{"checkpoint": "runs/demo/model", **settings})


@dataclass(frozen=True)
class Script:
    """What a request gets.

    Attributes:
        pieces: text, token ids and layers of each step.
        rest: text that comes with the end.
        refused: raised instead of an answer.
        failed: why it fails after its pieces; empty: it does not.
    """

    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    rest: str = ""
    reason: Reason = Reason.eos
    refused: Exception | None = None
    failed: str = ""
    certified: bool = True


def said_of(source: Source) -> str:
    """What the echo answers to a prompt."""
    return f"<{source if isinstance(source, str) else ' '.join(map(str, source))}>"


def echo(source: Source, options: RequestOptions) -> Script:
    """The prompt in brackets, three characters a token, then EOS; with the seed behind it when it is drawn."""
    text = said_of(source) + ("" if options.greedy else f"#{options.seed}")
    parts = [text[place : place + 3] for place in range(0, len(text), 3)]
    pieces = [(part, (5 + k % 90,), (1 + k % 8,)) for k, part in enumerate(parts)]
    most = options.max_tokens or INFO.max_target
    if len(pieces) >= most:
        return Script(tuple(pieces[:most]), reason=Reason.length)
    return Script((*pieces, ("", (1,), (8,))))


@dataclass(eq=False)
class FakeStream:
    """One request."""

    id: str
    source: Source
    options: RequestOptions
    deadline: float
    prompt_tokens: int
    pieces: bool
    events: "asyncio.Queue[Spoke | Ended | Exception]" = field(default_factory=asyncio.Queue)
    ended: Ended | None = None
    cancelled: bool = False
    over: bool = False

    def __aiter__(self) -> AsyncIterator[Spoke]:
        return self._spoken()

    async def _spoken(self) -> AsyncIterator[Spoke]:
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Ended):
                self.ended = event
                return
            yield event

    def cancel(self) -> None:
        self.cancelled = True


class FakeEngine:
    """Answers by ``script``; at most ``slots`` at a time, the others wait.

    Attributes:
        held: while true nobody gets a token.
        hold_at: so is everybody who was told so many pieces.
        running, waiting: requests in a slot, and without one.
        submitted: all of them, ever.
    """

    def __init__(
        self,
        script: Callable[[Source, RequestOptions], Script] = echo,
        *,
        slots: int = 4,
        max_waiting: int = 10_000,
        info: ModelInfo = INFO,
        load_error: Exception | None = None,
        ignores_deadlines: bool = False,
    ) -> None:
        self.script, self.slots, self.max_waiting = script, slots, max_waiting
        self.load_error, self.ignores_deadlines = load_error, ignores_deadlines
        self.on_batch: Callable[[Batch], None] | None = None
        self.state = "ready"
        self.restarts = 0
        self.info: ModelInfo | None = info
        self.held = False
        self.hold_at: int | None = None
        self.running = self.waiting = self.steps = 0
        self.submitted: list[FakeStream] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_load = True

    @property
    def load(self) -> Load:
        return Load(time.perf_counter(), self.steps, self.running, self.waiting, 0, 7, 5, 3, 1)

    @property
    def open(self) -> list[FakeStream]:
        return [stream for stream in self.submitted if not stream.over]

    # life

    async def start(self) -> None:
        self.state = "loading"

    async def ready(self) -> None:
        if self.load_error is not None:
            raise self.load_error
        while self.state != "ready":
            if self.state == "dead" and not self.restarts:
                raise EngineGone("it has ended")
            await asyncio.sleep(POLL_S)
            if self._may_load and self.state in ("loading", "dead"):
                self.restarts -= self.state == "dead"
                self.state = "ready"

    def hold_loading(self, held: bool) -> None:
        self._may_load = not held

    async def stop(self, drain_seconds: float) -> None:
        if self.state != "dead":
            self.state = "draining"
        until = time.monotonic() + drain_seconds
        while self.open and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        self.die()

    def die(self) -> None:
        self.state = "dead"
        for stream in self.open:
            stream.over = True
            stream.events.put_nowait(EngineGone("gone"))

    # requests

    def submit(
        self,
        source: Source,
        options: RequestOptions,
        *,
        deadline: float = 0.0,
        id: str | None = None,  # noqa: A002
        pieces: bool = True,
    ) -> FakeStream:
        if self.state == "draining":
            raise Draining("it is about to stop")
        if self.state != "ready":
            raise EngineGone("not there")
        assert id is not None and id not in {stream.id for stream in self.open}
        tokens = len(source.split()) + 1 if isinstance(source, str) else len(source)
        stream = FakeStream(id, source, options, deadline, tokens, pieces)
        self.submitted.append(stream)
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _serve(self, stream: FakeStream) -> None:
        arrived = time.perf_counter()
        refused = self._refusal(stream)
        if refused is not None:
            return self._end(stream, refused)
        self.waiting += 1
        while self.running >= self.slots and self._goes_on(stream):
            await asyncio.sleep(POLL_S)
        self.waiting -= 1
        if stream.over:
            return None
        self.running += 1
        try:
            await self._speak(stream, arrived)
        finally:
            self.running -= 1
        return None

    async def _speak(self, stream: FakeStream, arrived: float) -> None:
        script = self.script(stream.source, stream.options)
        admitted = first = time.perf_counter()
        told: list[tuple[int, ...]] = []
        said: list[str] = []
        for k, (text, tokens, layers) in enumerate(script.pieces):
            while (self.held or k == self.hold_at) and self._goes_on(stream):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(0)
            if not self._goes_on(stream):
                break
            told.append(layers)
            self.steps += 1
            said.append(text)
            if stream.pieces:
                self._tell(stream, Spoke(stream.id, text, tokens, layers))
            elif self.on_batch is not None:
                gaps = (GAP_S,) * (len(layers) - (len(told) == 1))
                self.on_batch(Batch((), self.load, Silent(layers, gaps)))
        if stream.over:
            return
        layers = tuple(layer for each in told for layer in each)
        expired = not self.ignores_deadlines and time.perf_counter() >= stream.deadline
        status, reason = Status.finished, script.reason
        if stream.cancelled or expired:
            status, reason = Status.cancelled, Reason.cancelled
        elif script.failed:
            status, reason = Status.failed, Reason.failed
        ended = Ended(
            id=stream.id, status=status, reason=reason,
            text="".join([*([] if stream.pieces else said), script.rest if status is Status.finished else ""]),
            prompt_tokens=min(stream.prompt_tokens, INFO.max_source), tokens=len(layers), certified=script.certified,
            emission_layers=layers, executed_layers=layers, involuntary=0,
            timing=Timing(arrived, admitted, first, time.perf_counter()), expired=expired and not stream.cancelled,
            error=script.failed,
        )  # fmt: skip
        self._end(stream, ended)

    def _goes_on(self, stream: FakeStream) -> bool:
        expired = not self.ignores_deadlines and time.perf_counter() >= stream.deadline
        return not (stream.over or stream.cancelled or expired)

    def _refusal(self, stream: FakeStream) -> Exception | None:
        if self.waiting >= self.max_waiting:
            return QueueFull("full")
        most = INFO.max_source
        if isinstance(stream.source, str) and stream.prompt_tokens > most and not stream.options.truncate:
            return DataError(f"the text has {stream.prompt_tokens} tokens, the model takes {most}; shorten it")
        return self.script(stream.source, stream.options).refused

    def _end(self, stream: FakeStream, event: Ended | Exception) -> None:
        if not stream.over:
            stream.over = True
            self._tell(stream, event)

    def _tell(self, stream: FakeStream, event: Spoke | Ended | Exception) -> None:
        if self.on_batch is not None:
            kind = type(event).__name__
            told = Refused(stream.id, kind, str(event)) if isinstance(event, Exception) else event
            self.on_batch(Batch((told,), self.load))
        stream.events.put_nowait(event)


def info_with(**changes: Any) -> ModelInfo:
    return replace(INFO, **changes)
