"""The engine's process from within: warm before it says so, alive while idle, and never held up by one long text."""

import logging
import multiprocessing
import os
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calm import save
from calm.config import BatchRule, Measure
from calm.errors import CalmError, CheckpointError, ConfigError
from serve import worker
from serve.desk import Desk
from serve.engine import Engine
from serve.frames import Channel, wait
from serve.messages import Abort, Batch, Ended, Failed, Log, Ready, Refused, Spoke, Stop, Submit
from serve.options import EngineOptions, RequestOptions
from serve.requests import Status
from serve.tokenising import Tokeniser
from serve.worker import BEAT_S, Settings, attend, info_of, made, warm
from tests.scripted import early_exit, random_t5

from .stories import ONE, TEN, story_engine
from .test_certified import artifact, certified_model

LONG = 100  # characters; such a text is tokenised elsewhere


class Attended:
    """An engine that is attended to in a thread; here is the server's end."""

    def __init__(self, engine: Engine) -> None:
        ours, theirs = socket.socketpair()
        self.tokeniser = Tokeniser(engine.model.to_ids, LONG - 1)
        self.channel, self._theirs = Channel(ours), Channel(theirs)
        self.raised: list[BaseException] = []
        self.batches: list[Batch] = []
        self._thread = threading.Thread(target=self._attend, args=(engine,))
        self._thread.start()

    def _attend(self, engine: Engine) -> None:
        try:
            attend(self._theirs, Desk(engine, self.tokeniser), self.tokeniser)
        except BaseException as error:
            self.raised.append(error)

    def submit(self, name: str, source: Any, deadline: float = 0.0, **options: Any) -> None:
        self.channel.send(Submit(name, source, RequestOptions(**options), time.perf_counter(), deadline))

    def until(self, found: Callable[[], Any]) -> None:
        """Read on until that is there."""
        while not found():
            wait([self.channel], 60)
            self.batches += self.channel.receive()

    def ended(self, name: str) -> Ended | None:
        events = (event for batch in self.batches for event in batch.events)
        return next((event for event in events if isinstance(event, Ended) and event.id == name), None)

    def tokens(self, name: str) -> tuple[int, ...]:
        events = (event for batch in self.batches for event in batch.events)
        return tuple(t for event in events if isinstance(event, Spoke) and event.id == name for t in event.tokens)

    def left(self) -> None:
        """Wait until it has left."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.channel.close()
        self.left()
        self._theirs.close()
        self.tokeniser.close()


@pytest.fixture
def attended() -> Iterator[Callable[..., Attended]]:
    made: list[Attended] = []

    def start(engine: Engine) -> Attended:
        made.append(Attended(engine))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_an_idle_engine_says_that_it_lives(attended: Callable[..., Attended]) -> None:
    assert BEAT_S <= 0.5
    at = attended(story_engine())
    at.until(lambda: len(at.batches) >= 4)
    beats = [batch.load.beat for batch in at.batches]
    assert all(BEAT_S * 0.9 <= later - beat for beat, later in zip(beats, beats[1:], strict=False))
    assert not any(batch.events for batch in at.batches) and at.batches[-1].load.steps == 0


def test_requests_come_and_go_and_it_leaves_when_they_have_ended(attended: Callable[..., Attended]) -> None:
    at = attended(story_engine())
    at.submit("a", "w3")
    at.submit("b", "w4")
    at.submit("refused", "w3", max_tokens=99)
    at.channel.send(Stop(drain=True))
    at.left()
    at.until(lambda: at.ended("a") and at.ended("b"))
    assert at.tokens("a") == ONE and at.tokens("b") == TEN
    assert [event.id for batch in at.batches for event in batch.events if isinstance(event, Refused)] == ["refused"]
    assert at.raised == []


def test_it_ends_with_the_server(attended: Callable[..., Attended]) -> None:
    at = attended(story_engine())
    at.submit("a", "w3")
    at.until(lambda: at.tokens("a"))
    at.channel.close()
    at.left()
    assert [type(error) for error in at.raised] == [EOFError]


class Gate:
    """Holds long texts up, in whichever process, until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._to_ids = engine.model.to_ids
        self.opened = multiprocessing.get_context("fork").Event()
        engine.model = replace(engine.model, to_ids=self)

    def __call__(self, text: str, cut: bool = True) -> list[int]:
        if len(text) >= LONG:
            assert self.opened.wait(60)
        return self._to_ids(text, cut)


def test_a_long_text_holds_nobody_up(attended: Callable[..., Attended]) -> None:
    """Rows decode and end while it is tokenised, and others come; it has 1 MiB."""
    engine = story_engine()
    gate = Gate(engine)
    at = attended(engine)
    at.submit("running", "w3")
    at.until(lambda: at.tokens("running"))
    at.submit("long", "w4 " * (2**20 // 3))
    at.until(lambda: at.ended("running") and at.batches[-1].load.waiting == 1)
    at.submit("later", "w4")
    at.until(lambda: at.ended("later"))
    assert at.tokens("running") == ONE and at.tokens("later") == TEN and at.ended("long") is None
    gate.opened.set()
    at.until(lambda: at.ended("long"))
    assert at.tokens("long") == TEN


def test_a_deadline_and_an_abort_reach_a_text_that_is_being_tokenised(attended: Callable[..., Attended]) -> None:
    engine = story_engine()
    gate = Gate(engine)
    at = attended(engine)
    at.submit("late", "w3 " * LONG, time.perf_counter() + 0.1)
    at.submit("aborted", "w3 " * LONG)
    at.until(lambda: at.ended("late"))
    at.channel.send(Abort("aborted"))
    at.until(lambda: at.ended("aborted"))
    late, aborted = at.ended("late"), at.ended("aborted")
    assert late is not None and late.expired and late.timing.ended - late.timing.arrived > 0.09
    assert aborted is not None and not aborted.expired
    at.submit("next", "w4 " * LONG)
    gate.opened.set()
    at.until(lambda: at.ended("next"))
    assert at.tokens("next") == TEN and at.batches[-1].load.waiting == 0


# the whole life, in a thread of its own instead of a process


def lived(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Settings], Engine], *commands: Any
) -> tuple[list[Any], int | None]:
    """What a life says to the commands, and its exit status; None: that of success."""
    monkeypatch.setattr(worker, "die_with_parent", lambda signum: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: types.SimpleNamespace(pid=os.getppid()))
    monkeypatch.setattr(worker, "made", make)
    ours, theirs = socket.socketpair()
    status: list[int | None] = []

    def life() -> None:
        try:
            with theirs:
                worker.work(theirs, Settings("anywhere", EngineOptions(), "m"))
            status.append(None)
        except SystemExit as error:
            status.append(error.code)  # type: ignore[arg-type]

    channel = Channel(ours)
    for command in commands:
        channel.send(command)
    thread = threading.Thread(target=life)
    thread.start()
    thread.join(60)
    said: list[Any] = []
    with pytest.raises(EOFError):
        while True:
            said += channel.receive()
    channel.close()
    return said, status[0]


def test_a_life_from_ready_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    said, status = lived(
        monkeypatch, lambda settings: story_engine(), Submit("a", "w3", RequestOptions(), 0.0), Stop(drain=True)
    )
    ready, *batches = said
    assert isinstance(ready, Ready) and ready.info.name == "m" and status is None
    assert [event.status for batch in batches for event in batch.events if isinstance(event, Ended)] == [
        Status.finished
    ]


def test_a_life_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(settings: Settings) -> Engine:
        raise CheckpointError("no such\n folder")

    assert lived(monkeypatch, refused) == ([Failed("CheckpointError", "no such folder")], 1)

    def broken(settings: Settings) -> Engine:
        raise ZeroDivisionError

    (log, failed), status = lived(monkeypatch, broken)
    assert (failed, status) == (Failed("ZeroDivisionError", "ZeroDivisionError"), 1)
    assert isinstance(log, Log) and "cannot be made (ZeroDivisionError at " in log.line and "\n" not in log.line


def test_steps_that_raise_one_after_another_end_the_life_with_a_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = story_engine()

    def broken() -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(engine, "step", broken)
    monkeypatch.setattr(worker, "warm", lambda engine: 3.0)
    said, status = lived(monkeypatch, lambda settings: engine, Submit("a", "w3", RequestOptions(), 0.0))
    assert status == 1 and isinstance(said[0], Ready) and said[0].longest_step == 3.0
    last = said[-1]
    assert isinstance(last, Log) and (last.name, last.level) == ("serve.worker", logging.CRITICAL)
    assert "(RuntimeError at " in last.line and "no such luck" not in last.line  # it may hold what a client sent
    assert logging.getLogger("serve").handlers == []


# what comes before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = early_exit(random_t5(vocabulary=40), length=6)
    path = save(model, tmp_path_factory.mktemp("worker") / "model")
    for measure in (Measure.softmax, Measure.classifier):
        artifact(measure).save(path / "calibration")
    return path


def settings(folder: Path, **options: Any) -> Settings:
    return Settings(str(folder), EngineOptions(max_batch=2, **options), "m")


def test_a_request_of_every_kind_went_through_before_it_is_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RequestOptions] = []
    lengths: list[int] = []
    generate = Engine.generate

    def watched(self: Engine, sources: Sequence[Any], options: Any) -> Any:
        asked.extend(options)
        lengths.extend(len(source) for source in sources)
        return generate(self, sources, options)

    monkeypatch.setattr(Engine, "generate", watched)
    engine = made(settings(folder))
    longest = warm(engine)
    assert [type(each.policy).__name__ for each in asked] == ["Full", "Confident"] * 2
    assert lengths == [engine.model.max_source] * 4
    assert longest >= 16 * min(step.total for step in engine.clock.history)  # that many may join at once
    assert not engine.has_work and not engine.slots.taken and engine.clock.steps > 0


def test_a_model_that_cannot_decode_is_never_ready(tmp_path: Path) -> None:
    broken = early_exit(random_t5(vocabulary=40), length=6)
    broken.hf.lm_head.weight.data.fill_(float("nan"))
    path = save(broken, tmp_path / "model")
    with pytest.raises(CheckpointError, match="the model cannot decode .the logits are not finite"):
        warm(made(settings(path)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"folder": "nowhere"}, CheckpointError), ({"dtype": "float16"}, CheckpointError), ({"dtype": "nn"}, ConfigError)],
)
def test_what_cannot_be_loaded_says_so(folder: Path, changes: dict[str, str], error: type[CalmError]) -> None:
    with pytest.raises(error):
        made(replace(settings(folder), **changes))


def test_a_client_may_know_what_is_certified_as_it_is_served() -> None:
    info = info_of(Engine(certified_model(), rule=BatchRule.own, max_batch=2), "m")
    assert (info.name, info.num_layers, info.exit_layers, info.max_batch) == ("m", 4, (1, 2, 3), 2)
    assert info.tolerances == {"risk": (0.01, 0.05, 0.1)} and info.measure == "softmax"
    assert info.about["rule"] == "own" and info.about["dtype"] == "float32"
    assert not any("/" in str(value) for value in info.about.values())
    coupled = info_of(Engine(certified_model(), rule=BatchRule.sync, max_batch=2), "m")
    assert coupled.tolerances == {"risk": (0.01,)}  # full depth
    plain = info_of(story_engine(), "m")
    assert (plain.tolerances, plain.measure) == ({}, None)


def test_a_gpu_that_is_not_there_is_one_clear_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no CUDA device; use device=auto or device=cpu"):
        made(replace(settings(folder), device="cuda"))
    assert made(replace(settings(folder), device="auto")).model.device.type == "cpu"
