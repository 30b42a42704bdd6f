"""Sampling, ends, streams, aborts and poison over decoder-only models: the prompts' own tokens are like the others."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Head, Preempt
from calm.errors import DataError
from serve import prompts
from serve.engine import Engine
from serve.heads import HeadState
from serve.model import ServedModel
from serve.requests import Answer, Reason, Status
from serve.wave import Spoken

from .causal_models import LAYERS, causal_engine, causal_served, policy_for, rows, texts, told
from .models import COUPLED, EXACT
from .near_ties import Tally

KINDS = ("softmax", "agreement", "static", "state", "full")
BAD = next(word for word in range(96, 3, -1) if not any(f"w{word}" in row.source.split() for row in rows()[:5]))
SMALL: dict[str, Any] = dict(max_batch=6, block_size=2, cache_blocks=14 * LAYERS)


def ended(engine: Engine) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while engine.has_work:
        found |= {answer.id: answer for answer in engine.step().answers}
    assert not engine.slots.taken and not engine.slots.num_blocks_used and not engine._exits.present
    return found


def add_mates(engine: Engine) -> None:
    for number, kind in enumerate(KINDS):
        engine.add_request(rows()[number].source, policy=policy_for(kind, f"r{number}", number), name=f"r{number}")


def mates_are_as_alone(answers: dict[str, Answer]) -> None:
    tally = Tally()
    for number, kind in enumerate(KINDS):
        assert answers[f"r{number}"].status is Status.finished
        tally.compare(answers[f"r{number}"], told(number, kind))
    tally.check()
    assert tally.ties == 0


@pytest.mark.parametrize("preempt", list(Preempt), ids=lambda how: how.value)
def test_draws_are_the_requests_own_whoever_the_mates_and_whatever_is_preempted(preempt: Preempt) -> None:
    def drawn(**options: Any) -> list[tuple[int, ...]]:
        engine = causal_engine(BatchRule.compact, preempt=preempt, **options)
        for number, text in enumerate(texts(8)):
            engine.add_request(text, temperature=1.5, top_p=0.9, seed=number, name=str(number), ignore_eos=True)
        answers = ended(engine)
        assert bool(engine.preemption.count) is ("cache_blocks" in options)
        return [answers[str(number)].tokens for number in range(8)]

    alone = drawn(max_batch=1)
    assert alone == drawn(max_batch=6) == drawn(**SMALL)
    greedy = [told(number, "full").trace.tokens for number in range(8)]
    assert all(mine != theirs for mine, theirs in zip(alone, greedy, strict=True))
    assert any(mine[0] != theirs[0] for mine, theirs in zip(alone, greedy, strict=True)), "the first is drawn too"


def test_ends_count_from_the_prompts_own_token() -> None:
    engine = causal_engine(BatchRule.own)
    whole = told(0, "full").trace
    words = [f"w{token}" for token in whole.tokens]

    def answer(**options: Any) -> Answer:
        return engine.generate([rows()[0].source], **options)[0]

    assert answer(max_tokens=1).tokens == whole.tokens[:1]
    stopped = answer(stop=(words[0],))
    assert (stopped.text, stopped.tokens, stopped.reason) == ("", whole.tokens[:1], Reason.stop)
    stopped = answer(stop=(words[2],))
    assert (stopped.tokens, stopped.reason) == (whole.tokens[:3], Reason.stop)
    assert answer(stop_ids={whole.tokens[1]}).tokens == whole.tokens[:2]
    assert len(answer(min_tokens=9).tokens) >= 9
    assert "".join(engine.stream(rows()[0].source)) == answer().text == whole.text


def test_eos_said_by_a_prompt_ends_the_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = causal_engine(BatchRule.own)
    first = prompts.first_words

    def says_eos(*given: Any) -> Spoken:
        return replace(first(*given), tokens=[1])

    monkeypatch.setattr("serve.turns.first_words", says_eos)
    found = engine.generate(texts(1))[0]
    assert (found.tokens, found.reason, found.emission_layers) == ((1,), Reason.eos, (4,))


def test_prompts_count_what_the_screen_left_to_the_full_head(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = causal_engine(BatchRule.own, head=Head.screened, head_k=5)
    emit = engine.machine.head.emit

    def undecided(hidden: Tensor, early: Tensor, state: HeadState) -> Tensor:
        tokens = emit(hidden, early, state)
        state.fallbacks = 3
        return tokens

    monkeypatch.setattr(engine.machine.head, "emit", undecided)
    engine.generate(texts(1), max_tokens=1)
    assert [record.fallbacks for record in engine.clock.history] == [3]


def test_a_stream_goes_on_beside_others_that_are_preempted() -> None:
    engine = causal_engine(BatchRule.own, **SMALL)
    for number in range(1, 6):
        engine.add_request(texts()[number], name=str(number), ignore_eos=True)
    last = engine.stream(texts()[0], ignore_eos=True)
    alone = causal_engine(BatchRule.own).generate([texts()[0]], ignore_eos=True)[0]
    assert "".join(last) == alone.text
    ended(engine)
    assert engine.preemption.count


@pytest.mark.parametrize("preempt", list(Preempt), ids=lambda how: how.value)
def test_a_row_that_is_aborted_while_it_is_preempted_leaves_nothing(preempt: Preempt) -> None:
    engine = causal_engine(BatchRule.own, preempt=preempt, **SMALL)
    add_mates(engine)
    engine.add_request(texts()[7], name="late", ignore_eos=True)
    answers: dict[str, Answer] = {}
    while not any(row.tokens for row in engine._waiting):
        answers |= {answer.id: answer for answer in engine.step().answers}
    (gone, *_) = [row for row in engine._waiting if row.tokens][::-1]
    said = list(gone.tokens)
    assert engine.abort(gone.id) and not engine.abort(gone.id)
    assert not engine.preemption.has(gone)
    answers |= ended(engine)
    assert answers[gone.id].status is Status.cancelled and list(answers[gone.id].tokens) == said
    assert not engine.preemption.held_bytes


def raising(engine: Engine, at_layer: int) -> Callable[..., Tensor]:
    """The engine's layer function, which raises when a row called poison is in the batch."""
    run = engine.machine.runner.layer

    def layer(layer: int, hidden: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        poison = {row.slot for row in engine._running if row.id.startswith("poison")}
        if layer == at_layer and poison & set(slots.tolist()):
            raise RuntimeError("no such luck")
        return run(layer, hidden, slots, *rest)

    return layer


@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("rule", [*EXACT, BatchRule.sync], ids=lambda rule: rule.value)
def test_a_row_that_raises_fails_alone(rule: BatchRule, later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt has said its first token by then; rows whose prompts speak in that step speak once."""
    engine = causal_engine(rule, max_batch=8, prefill_calls=6)
    monkeypatch.setattr(engine.machine.runner, "layer", raising(engine, 2))
    add_mates(engine)
    answers: dict[str, Answer] = {}
    for _ in range(later):
        answers |= {answer.id: answer for answer in engine.step().answers}
    engine.add_request("w50 w51", name="poison")
    answers |= {answer.id: answer for answer in engine.step().answers}
    engine.add_request("w52", name="new", max_tokens=4, ignore_eos=True)
    answers |= ended(engine)
    assert (answers["poison"].status, answers["poison"].error) == (Status.failed, "no such luck")
    assert len(answers["poison"].tokens) == 1 and len(answers["new"].tokens) == 4
    if rule in EXACT:
        mates_are_as_alone(answers)
    assert rule in (*EXACT, *COUPLED)


@cache
def bad_model(how: str) -> ServedModel:
    """A model that raises where it reads a poison prompt, or reads NaN."""
    model = causal_served()
    assert model.read is not None
    whole = model.read

    def read(ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        bad = (ids == BAD).any(dim=1)
        if how == "raise" and bad.any():
            raise ValueError("cannot read that")
        keys, values, hidden = whole(ids, mask)
        keys = torch.where(bad[None, :, None, None, None], torch.nan, keys)
        return keys, values, hidden if how == "nan keys" else torch.where(bad[:, None], torch.nan, hidden)

    return replace(model, read=read)


@pytest.mark.parametrize("how", ["raise", "nan", "nan keys"])
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_a_bad_prompt_fails_alone_and_spoils_no_block(rule: BatchRule, how: str) -> None:
    engine = causal_engine(rule, bad_model(how), max_batch=7, prefill_rows=4, prefill_calls=6, block_size=2)
    for turn in range(2):  # who follows in blocks that held NaN finds nothing of it
        engine.add_request(f"w{BAD}", name="poison0")
        add_mates(engine)
        engine.add_request(f"w7 w{BAD} w8", name="poison1")
        answers = ended(engine)
        expected = "cannot read that" if how == "raise" else "the logits are not finite"
        assert [answers[f"poison{i}"].error for i in (0, 1)] == [expected] * 2, turn
        mates_are_as_alone(answers)


def test_a_first_word_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = causal_engine(BatchRule.own, max_batch=7, prefill_calls=6)
    emit = engine.machine.head.emit
    add_mates(engine)
    engine.add_request("w9", name="poison")
    poison = engine.row("poison")
    assert poison is not None

    def breaks(hidden: Tensor, *rest: Any) -> Tensor:
        if poison.slot >= 0 and not poison.over and (hidden == engine.slots.said[poison.slot]).all(dim=1).any():
            raise RuntimeError("emit breaks")
        return emit(hidden, *rest)

    monkeypatch.setattr(engine.machine.head, "emit", breaks)
    answers = ended(engine)
    assert (answers["poison"].error, answers["poison"].tokens) == ("emit breaks", ())
    mates_are_as_alone(answers)


def test_a_text_without_tokens_has_nothing_to_continue() -> None:
    model = replace(causal_served(), to_ids=lambda text, cut=True: [])
    with pytest.raises(DataError, match="the text has no tokens"):
        causal_engine(BatchRule.own, model).add_request(" ")


@pytest.mark.parametrize("preempt", list(Preempt), ids=lambda how: how.value)
def test_an_interrupt_loses_nobody_who_was_preempted(preempt: Preempt, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = causal_engine(BatchRule.own, preempt=preempt, **SMALL)
    add_mates(engine)
    answers: dict[str, Answer] = {}
    put, interrupted = engine.slots.put_source, [0]

    def stopped(slot: int, *given: Any) -> None:
        if interrupted[0] < 3 and any(row.tokens for row in engine._rows.values() if row.slot < 0):
            interrupted[0] += 1
            raise KeyboardInterrupt
        put(slot, *given)

    monkeypatch.setattr(engine.slots, "put_source", stopped)
    while engine.has_work:
        try:
            answers |= {answer.id: answer for answer in engine.step().answers}
        except KeyboardInterrupt:
            assert {row.slot for row in engine._running} == engine.slots.taken
    assert interrupted[0] == 3 and engine.preemption.count
    mates_are_as_alone(answers)
