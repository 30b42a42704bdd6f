"""Between the queue and the slots nobody is lost, and rows that wait for company wait for a bounded time."""

import pytest
import torch

from calm.config import BatchRule
from calm.errors import ConfigError, DataError
from calm.policies import Replay
from serve.engine import Engine

from .models import LENGTH, engine_of, texts, tiny_served


def answers_of(engine: Engine) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        found |= {answer.id: answer.tokens for answer in engine.step().answers}
    return found


def test_an_interrupt_while_encoding_puts_the_group_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    calm = engine_of(BatchRule.own, max_batch=4)
    for each in (engine, calm):
        for number, text in enumerate(texts(6)):
            each.add_request(text, name=f"r{number}")
    prefill = engine.prefill

    def interrupted(sources: object) -> object:
        monkeypatch.setattr(engine, "prefill", prefill)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "prefill", interrupted)
    monkeypatch.setattr(interrupted, "alike", prefill.alike, raising=False)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.num_waiting == 6 and engine.num_running == 0 and not engine.slots.taken
    assert answers_of(engine) == answers_of(calm)


def test_an_interrupted_generate_leaves_the_engine_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.own, max_batch=2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.slots, "put_source", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(texts(5))
    assert not engine.has_work and not engine.slots.taken
    assert [answer.status.value for answer in engine.generate(texts(2))] == ["finished"] * 2


def test_a_row_that_cannot_be_seated_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    put, calls = engine.slots.put_source, [0]

    def full(slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("no room")
        put(slot, keys, values)

    monkeypatch.setattr(engine.slots, "put_source", full)
    first, second, third = engine.generate(texts(3))
    assert (first.status.value, second.status.value, third.status.value) == ("finished", "failed", "finished")
    assert second.error == "no room" and not engine.slots.taken and not engine._exits.present
    alone = engine_of(BatchRule.own, max_batch=4).generate(texts(3))
    assert (first.tokens, third.tokens) == (alone[0].tokens, alone[2].tokens)


def test_company_that_comes_does_not_make_a_waiting_row_younger() -> None:
    """One deep row joins in every few waves: the first of them still ends within its age."""
    max_age = 3
    engine = Engine(tiny_served(), rule=BatchRule.rebatch, company=6, max_age=max_age, max_batch=8, poison=True)
    shallow, deep = (1,) * LENGTH, (2, *[1] * (LENGTH - 1))
    coming = texts(12)
    engine.add_request(coming[0], name="first", policy=Replay({"first": (4,) * LENGTH}), ignore_eos=True)
    steps = spoken = 0
    for number, text in enumerate(coming[1:]):
        name = f"r{number}"
        depths = deep if number % 2 else shallow
        engine.add_request(text, name=name, policy=Replay({name: depths}), ignore_eos=True)
        for _ in range(2):
            steps += 1
            spoken += "first" in dict(engine.step().tokens)
    assert spoken >= steps // (2 * (max_age + 2))
    answers_of(engine)


def test_one_text_is_no_list_of_sources() -> None:
    with pytest.raises(DataError, match=r"generate\(\[text\]\)"):
        engine_of(BatchRule.own).generate("a text")


def test_a_stream_is_queued_and_refused_at_once() -> None:
    engine = engine_of(BatchRule.own)
    with pytest.raises(ConfigError, match="max_tokens"):
        engine.stream(texts()[0], max_tokens=10**6)
    pieces = engine.stream(texts()[0])
    assert engine.num_waiting == 1
    assert "".join(pieces) == engine_of(BatchRule.own).generate([texts()[0]])[0].text
