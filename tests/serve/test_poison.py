"""A request that breaks its step, its encoding or its numbers fails alone, in one line, and the engine goes on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Head, Measure
from calm.policies import Full, Policy, Replay
from serve.engine import Engine
from serve.model import ServedModel
from serve.requests import Answer, Reason, Status

from .models import COUPLED, EXACT, LENGTH, confident, engine_of, policy_for, rows, texts, tiny_served
from .near_ties import Tally, told

BAD = 96  # a source with this id is poison
KINDS = ("softmax", "agreement-2", "static", "state", "full")
SOURCES = (0, 1, 5, 6, 9)
ALL = [*EXACT, *COUPLED]


def raising(engine: Engine, at_layer: int = 1, error: Exception | None = None) -> Callable[..., Tensor]:
    """The engine's layer function, which raises when a row called poison is in the batch."""
    run = engine.machine.runner.layer
    error = error or RuntimeError("no such luck\n  in a second line")

    def layer(layer: int, hidden: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        poison = {row.slot for row in engine._running if row.id.startswith("poison")}
        if layer == at_layer and poison & set(slots.tolist()):
            raise error
        return run(layer, hidden, slots, *rest)

    return layer


def served_mates(engine: Engine, poison: dict[int, str], later: int = 0) -> dict[str, Answer]:
    """Answers to mates of every kind; poison (source by name) comes ``later`` steps after them."""
    for number, kind in zip(SOURCES, KINDS, strict=True):
        engine.add_request(rows()[number].source, policy=policy_for(kind, f"r{number}", number), name=f"r{number}")
    answers: dict[str, Answer] = {}
    for _ in range(later):
        answers.update({answer.id: answer for answer in engine.step().answers})
    for number, source in poison.items():
        engine.add_request(source, name=f"poison{number}")
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    assert not engine.slots.taken
    return answers


def mates_are_as_alone(answers: dict[str, Answer]) -> None:
    tally = Tally()
    for number, kind in zip(SOURCES, KINDS, strict=True):
        assert answers[f"r{number}"].status is Status.finished
        tally.compare(answers[f"r{number}"], told(number, kind))
    tally.check()
    assert tally.ties == 0


@pytest.mark.parametrize("at_layer", [1, 3])
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.value)
def test_a_row_that_raises_fails_alone(
    rule: BatchRule, later: int, at_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> Engine:
        return engine_of(rule, quantile=0.6, max_batch=6, prefill_calls=6)

    poisoned = engine()
    monkeypatch.setattr(poisoned.machine.runner, "layer", raising(poisoned, at_layer))
    answers = served_mates(poisoned, {0: "w50 w51"}, later)
    assert answers["poison0"].status is Status.failed and answers["poison0"].reason is Reason.failed
    assert answers["poison0"].error == "no such luck in a second line"
    assert answers["poison0"].tokens == () and not answers["poison0"].certified
    if rule in EXACT:
        mates_are_as_alone(answers)
    else:  # as if it had never been there
        clean = served_mates(engine(), {})
        assert {name: answer.tokens for name, answer in answers.items() if name in clean} == {
            name: answer.tokens for name, answer in clean.items()
        }


@cache
def bad_model(how: str) -> ServedModel:
    """A model whose encoder raises on a poison source, or answers it with NaN."""
    model = tiny_served()

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        bad = (ids == BAD).any(dim=1)
        if how == "raise" and bad.any():
            raise ValueError("cannot encode that")
        return torch.where(bad[:, None, None], torch.nan, model.encode(ids, mask))

    return replace(model, encode=encode, encoder=None)


@pytest.mark.parametrize("how", ["raise", "nan"])
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.value)
def test_a_bad_encoding_and_bad_numbers_fail_alone(rule: BatchRule, how: str) -> None:
    engine = engine_of(rule, bad_model(how), quantile=0.6, max_batch=7, prefill_rows=4)
    answers = served_mates(engine, {0: f"w{BAD}", 1: f"w7 w{BAD} w8"})
    expected = {"raise": "cannot encode that", "nan": "the logits are not finite"}[how]
    assert [answers[f"poison{i}"].error for i in (0, 1)] == [expected] * 2
    assert [answers[f"poison{i}"].status for i in (0, 1)] == [Status.failed] * 2
    if rule in EXACT:
        mates_are_as_alone(answers)
    else:
        assert all(answers[f"r{number}"].status is Status.finished for number in SOURCES)


# poison in the middle of a step: a source that makes activations so large that every part of the step can tell

LOUD = 1e3


def is_loud(hidden: Tensor) -> Tensor:
    """Rows, of which padding rows are none: what they read in slots that are free is NaN here."""
    largest = hidden.abs().amax(dim=-1)
    return (largest > LOUD) & largest.isfinite()


def told_apart(what: str, engine: Engine, how: str) -> tuple[object, str, Callable[..., Any]]:
    """The function of a part of the step, and what is to stand for it: it fails on loud rows."""
    owner: object = engine.machine.runner if what in ("backfill", "logits") else engine.machine.head
    real = getattr(owner, what)

    def fails(hidden: Tensor, *rest: Any) -> Any:
        bad = is_loud(hidden)
        if how == "raise" and bool(bad.any()):
            raise RuntimeError(f"{what} breaks")
        if what == "backfill":
            return real(torch.where(bad[:, None], torch.nan, hidden), *rest)
        out = real(hidden, *rest)
        return torch.where(bad[:, None], torch.nan, out) if out.ndim == 2 else torch.where(bad, -1, out)

    return owner, what, fails


@cache
def loud_model() -> ServedModel:
    model = tiny_served()

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model.encode(ids, mask)
        return torch.where((ids == BAD).any(dim=1)[:, None, None], hidden * 1e4, hidden)

    return replace(model, encode=encode, encoder=None)


LIMIT = 6  # of the mates: some time poison is alone, so that a step of its own decides


def among_mates(engine: Engine, policy: Policy | None) -> dict[str, Answer]:
    """Mates of every kind and, where a policy is given, two poison rows that come after them and stay longer."""
    for number, kind in zip(SOURCES, KINDS, strict=True):
        name = f"r{number}"
        engine.add_request(rows()[number].source, policy=policy_for(kind, name, number), name=name, max_tokens=LIMIT)
    answers: dict[str, Answer] = {}
    for turn in range(2):
        answers.update({answer.id: answer for answer in engine.step().answers})
        if policy is not None:
            engine.add_request(f"w{BAD} w{50 + turn}", policy=policy, name=f"poison{turn}", ignore_eos=True)
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
        assert {row.slot for row in engine._running} == engine.slots.taken
    assert not engine.slots.taken and not engine._exits.present and not engine.turns.parked
    return answers


def mates_are_undisturbed(answers: dict[str, Answer]) -> None:
    tally = Tally()
    for number, kind in zip(SOURCES, KINDS, strict=True):
        assert answers[f"r{number}"].status is Status.finished
        tally.compare(answers[f"r{number}"], told(number, kind), limit=LIMIT)
    tally.check()
    assert tally.ties == 0


POISON: dict[str, Policy] = {
    "check": confident(Measure.softmax, 0.999),  # it is asked at every layer
    "emit": Full(),
    "logits": confident(Measure.agreement, 0.9),
    # layers that were filled are read two tokens later; both rows are shallow at once, so that nobody fills for them
    "backfill": Replay({f"poison{turn}": (1, 1, 4) * 4 for turn in range(2)}),
}


@pytest.mark.parametrize("how", ["raise", "nan"])
@pytest.mark.parametrize("what", POISON)
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.value)
def test_whatever_part_of_a_step_breaks_a_row_fails_alone(
    rule: BatchRule, what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(rule, loud_model(), quantile=0.6, max_batch=7, prefill_calls=6)
    monkeypatch.setattr(*told_apart(what, engine, how))
    answers = among_mates(engine, POISON[what])
    for turn in range(2):
        poison = answers[f"poison{turn}"]
        if (what, how) == ("check", "nan"):  # a confidence that is no number lets nobody out, and breaks nothing
            assert poison.status is Status.finished
            assert rule in COUPLED or set(poison.crossing_layers) == {4}
            continue
        assert poison.status is Status.failed and len(poison.tokens) < LENGTH
        assert poison.error == ("the logits are not finite" if how == "nan" else f"{what} breaks")
    assert all(answers[f"r{number}"].status is Status.finished for number in SOURCES)
    if rule in EXACT:
        mates_are_undisturbed(answers)  # under the others a mate that is gone is a mate that speaks no more
        # who follows in a slot that held NaN finds nothing of it
        again = among_mates(engine, None)
        assert [again[f"r{number}"].tokens for number in SOURCES] == [
            answers[f"r{number}"].tokens for number in SOURCES
        ]


@pytest.mark.parametrize("head", [Head.candidates, Head.screened], ids=lambda head: head.value)
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_thin_heads_keep_bad_numbers_to_their_row(rule: BatchRule, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the logits of a row, against the same rows without it."""
    clean = among_mates(engine_of(rule, loud_model(), head=head, head_k=5, max_batch=6, buckets=(6,)), None)
    engine = engine_of(rule, loud_model(), head=head, head_k=5, max_batch=6, buckets=(6,))
    layer = engine.machine.runner.layer

    def spoils(*given: Any) -> Tensor:
        out = layer(*given)
        return torch.where(is_loud(out)[:, None], torch.nan, out)

    monkeypatch.setattr(engine.machine.runner, "layer", spoils)
    answers = among_mates(engine, confident(Measure.softmax, 0.999))
    assert {answers[f"poison{turn}"].error for turn in range(2)} == {"the logits are not finite"}
    assert {name: answer.tokens for name, answer in answers.items() if name in clean} == {
        name: answer.tokens for name, answer in clean.items()
    }


def test_rows_that_wait_for_company_start_their_step_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.rebatch, company=4, max_age=8, max_batch=8)
    monkeypatch.setattr(engine.machine.runner, "layer", raising(engine))
    for number in (0, 6):
        engine.add_request(rows()[number].source, name=f"r{number}")
    engine.step()
    assert sum(wave.size for wave in engine.turns.parked) == 2
    engine.add_request("w50 w51", name="poison")
    answers: dict[str, Answer] = {}
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    assert answers["poison"].status is Status.failed
    for number in (0, 6):
        Tally().compare(answers[f"r{number}"], told(number, "full"))


def test_after_three_poisons_the_engine_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.rebatch, max_batch=4)
    monkeypatch.setattr(engine.machine.runner, "layer", raising(engine, 2, MemoryError()))
    for turn in range(3):
        answers = served_mates(engine, {turn: f"w{40 + turn}"}, later=2)
        assert answers[f"poison{turn}"].error == "MemoryError"
    mates_are_as_alone(served_mates(engine, {}))


def test_rows_that_raise_only_together_all_fail_and_the_engine_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(BatchRule.own, max_batch=6, prefill_calls=6)
    run = engine.machine.runner.layer

    def layer(layer: int, hidden: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        if len(set(slots.tolist()) & engine.slots.taken) > 1:
            raise RuntimeError("too many")
        return run(layer, hidden, slots, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine.machine.runner, "layer", layer)
        answers = served_mates(engine, {})
        assert {answer.error for answer in answers.values()} == {"too many"}
    mates_are_as_alone(served_mates(engine, {}))


def test_ids_that_cannot_be_read_fail_alone() -> None:
    """The tokenizer raises for one row's ids: at its end, and at every token where a stop string needs its text."""
    model = tiny_served()
    expected = engine_of(BatchRule.own, model).generate(texts(4))
    bad = set(expected[2].tokens) - {token for i in (0, 1, 3) for token in expected[i].tokens}
    assert bad

    def reads(ids: Sequence[int]) -> str:
        if bad & set(ids):
            raise ValueError("no such word")
        return model.to_text(ids)

    engine = engine_of(BatchRule.own, replace(model, to_text=reads))
    for stop in ((), ("never said",)):
        answers = engine.generate(texts(4), stop=stop)
        assert [answer.status is Status.failed for answer in answers] == [False, False, True, False]
        assert (answers[2].error, answers[2].text) == ("no such word", "")
        assert [answers[i].tokens for i in (0, 1, 3)] == [expected[i].tokens for i in (0, 1, 3)]
        assert not engine.has_work and not engine.slots.taken
