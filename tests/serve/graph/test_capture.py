"""Captured steps: the same answers from what was noted once, and a device that refuses costs no more than this step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calm.config import BatchRule, RunnerName, Stepping
from calm.errors import ConfigError
from serve.engine import Engine
from serve.errors import CaptureError
from serve.graph.program import Act
from serve.graph.stepping import WARMUPS, CudaCapture
from serve.requests import Status

from ..models import engine_of, texts
from .recorded import Recorded
from .test_step import RULES, by_name, graph_engine, mixed, said


def captured_engine(rule: BatchRule, **options: Any) -> tuple[Engine, Recorded]:
    engine, capture = graph_engine(rule, max_batch=4, buckets=(1, 2, 4), **options), Recorded()
    engine.machine.capture = capture
    return engine, capture


@pytest.mark.parametrize("stepping", [Stepping.whole, Stepping.segments])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.value)
def test_what_was_noted_once_answers_as_the_eager_runner(rule: BatchRule, stepping: Stepping) -> None:
    """Rows come and go, by every measure, at several batch sizes: nothing that changes is baked in."""
    asked = mixed(24)
    engine, capture = captured_engine(rule, stepping=stepping)
    found = by_name(engine, asked)
    assert not [answer.error for answer in found.values() if answer.status is Status.failed]
    assert said(found) == said(by_name(engine_of(rule, runner=RunnerName.eager, max_batch=4, buckets=(1, 2, 4)), asked))
    assert capture.replays > len(engine.machine._steps) > 1


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact], ids=lambda rule: rule.value)
def test_what_was_noted_once_is_sent_ahead(rule: BatchRule) -> None:
    asked = mixed(24)
    ahead = said(by_name(captured_engine(rule, overlap=True)[0], asked))
    assert ahead == said(by_name(captured_engine(rule, overlap=False)[0], asked))


def test_a_number_of_the_host_is_seen() -> None:
    """The stand-in would tell: what the host knew at the capture stays, and a look is refused."""
    numbers, known = torch.zeros(2), [1.0]

    def add() -> None:
        numbers.add_(known[0])

    def look() -> None:
        numbers.fill_(float(numbers.sum()))

    replay = Recorded()(add)
    assert numbers.tolist() == [0.0, 0.0]
    known[0] = 5.0
    replay()
    assert numbers.tolist() == [1.0, 1.0]
    with pytest.raises(AssertionError, match="looks at a number"):
        Recorded()(look)
    for act in (lambda: numbers[numbers > 0], lambda: torch.tensor([1.0])):  # of a shape, and of the host's memory
        with pytest.raises(AssertionError, match=r"looks at a number|comes from the host"):
            Recorded()(act)


class Graph:
    """A CUDA graph that notes what happens to it."""

    def __init__(self, notes: list[str], refuses: str) -> None:
        self.notes, self.refuses = notes, refuses

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.notes.append(f"begin {pool} {capture_error_mode} collecting={gc.isenabled()}")
        if self.refuses == "begin":
            raise RuntimeError("no\n  graphs here")

    def capture_end(self) -> None:
        self.notes.append("end")
        if self.refuses == "end":
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.notes.append("replay")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda as far as a capture knows it. ``notes``: what happened; ``refuses``: begin or end."""
    card = SimpleNamespace(notes=[], refuses="", present=["usual"])

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        card.present.append("own")
        try:
            yield
        finally:
            card.present.pop()

    stream = SimpleNamespace(
        wait_stream=lambda other: card.notes.append("own waits"), synchronize=lambda: card.notes.append("synchronize")
    )
    usual = SimpleNamespace(wait_stream=lambda other: card.notes.append("usual waits"))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: usual)
    pools = iter(range(7, 99))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(card.notes, card.refuses))
    ended = lambda device, pool: card.notes.append(f"pool {pool} of {device} ended")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    return card


def test_an_act_is_warmed_up_captured_and_replayed(card: SimpleNamespace) -> None:
    replay = CudaCapture(torch.device("cuda", 0))(lambda: card.notes.append("act"))
    replay()
    begun = "begin (0, 7) thread_local collecting=False"
    assert card.notes == [
        "own waits", *["act"] * WARMUPS, "synchronize", begun, "act", "end", "usual waits", "replay"
    ]  # fmt: skip
    assert gc.isenabled()


@pytest.mark.parametrize("refuses", ["begin", "end"])
def test_a_refused_capture_leaves_nothing_behind(card: SimpleNamespace, refuses: str) -> None:
    """The usual stream is current again, garbage is collected again, and the next capture has a pool of its own."""
    card.refuses = refuses
    capture = CudaCapture(torch.device("cuda", 1))
    with pytest.raises(CaptureError, match="^the step cannot be captured .*; choose runner=eager$") as told:
        capture(lambda: None)
    assert "\n" not in str(told.value) and isinstance(told.value.__cause__, RuntimeError)
    assert card.present == ["usual"] and gc.isenabled()
    assert "pool (0, 7) of 1 ended" in card.notes
    card.refuses = ""
    capture(lambda: None)()
    assert card.notes[-5:] == [
        "synchronize", "begin (0, 8) thread_local collecting=False", "end", "usual waits", "replay"
    ]  # fmt: skip


@pytest.mark.parametrize("refuses", ["", "end"])
def test_an_act_that_raises_ends_the_capture_and_is_the_one_to_tell(card: SimpleNamespace, refuses: str) -> None:
    card.refuses, calls = refuses, list[int]()

    def act() -> None:
        calls.append(1)
        if len(calls) > WARMUPS:
            raise ValueError("the act's own")

    with pytest.raises(CaptureError, match="the act's own"):
        CudaCapture(torch.device("cuda", 0))(act)
    assert card.notes[-2:] == ["end", "pool (0, 7) of 1 ended"] and gc.isenabled()


@pytest.mark.parametrize("error", [ConfigError("no such head"), KeyboardInterrupt()], ids=["of a user", "of nobody"])
def test_what_is_not_the_captures_is_told_as_it_is(card: SimpleNamespace, error: BaseException) -> None:
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) > WARMUPS:
            raise error

    with pytest.raises(type(error)) as told:
        CudaCapture(torch.device("cuda", 0))(act)
    assert told.value is error and gc.isenabled() and card.present == ["usual"]


def test_rows_of_a_step_that_cannot_be_captured_fail_at_once() -> None:
    """All with the reason, and the capture is not tried for each of them again."""
    engine, tried = graph_engine(max_batch=4), list[Act]()

    def refused(act: Act) -> Act:
        tried.append(act)
        raise CaptureError("the step cannot be captured (no graphs here); choose runner=eager")

    engine.machine.capture = refused
    answers = engine.generate(texts(3), max_tokens=3)
    assert [answer.status for answer in answers] == [Status.failed] * 3
    assert all("no graphs here" in answer.error for answer in answers) and len(tried) <= 2
    assert engine.num_running == 0
