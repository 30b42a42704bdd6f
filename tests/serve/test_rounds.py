"""Rows that draft: the answers of full depth whatever is drafted, beside any mates, and what a round records."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from calm.config import BatchRule, Head, Measure, RunnerName
from calm.drafting import Draft, accepted, said
from calm.errors import ConfigError
from calm.policies import Full
from serve.engine import Engine
from serve.model import ServedModel
from serve.native.views import PLACES
from serve.options import RequestOptions
from serve.requests import Answer, Reason, Status
from serve.rounds import Round

from . import models
from .models import LENGTH, SHAPES, engine_of, policy_for, rows, texts, tiny_served
from .near_ties import Tally, told

pytestmark = [pytest.mark.usefixtures("each_runner"), pytest.mark.not_graph]
DRAFTS = (
    Draft(1, 1),
    Draft(1, 4),
    Draft(2, 3),
    Draft(3, 2),
    Draft(3, 15),
    Draft(1, 6, Measure.softmax, 0.02),
    Draft(2, 6, Measure.state, 0.8),
    Draft(2, 6, Measure.classifier, 0.5),
    Draft(3, 6, Measure.max_prob, 0.1),
    Draft(3, 6, Measure.entropy, 0.2),
)


def full(shape: str = "v1.1", count: int = 12, **options: Any) -> list[Answer]:
    return engine_of(BatchRule.own, tiny_served(shape), max_batch=4, **options).generate(texts(count), policy=Full())


def shared(answers: list[Answer]) -> float:
    return sum(answer.accepted for answer in answers) / max(1, sum(answer.drafted for answer in answers))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_every_draft_gives_the_answers_of_full_depth(draft: Draft, shape: str) -> None:
    engine = engine_of(BatchRule.own, tiny_served(shape), max_batch=5)
    answers = engine.generate(texts(), draft=draft)
    tally = Tally()
    for number, answer in enumerate(answers):
        tally.compare(answer, told(number, "full", shape))
        assert answer.status is Status.finished
        assert answer.certified
        layers = engine.model.spec.num_layers
        assert set(answer.emission_layers) == set(answer.executed_layers) == {layers}
        assert 0 <= answer.accepted <= answer.drafted <= draft.length * answer.rounds
        assert answer.rounds + answer.accepted >= len(answer.tokens) >= answer.rounds
    tally.check(depths=1)
    assert not engine.slots.taken


def test_drafts_of_these_models_are_right_at_times() -> None:
    """Else nothing above says much."""
    shares = [
        shared(engine_of(BatchRule.own, tiny_served(shape), max_batch=4).generate(texts(), draft=draft))
        for shape in SHAPES
        for draft in DRAFTS
    ]
    assert any(share > 0.5 for share in shares)
    assert any(0.0 < share < 0.5 for share in shares)


@pytest.mark.parametrize("each_runner", [RunnerName.native], indirect=True)  # torch's products depend on their size
def test_native_rounds_have_the_bits_of_full_depth() -> None:
    """At any batch size, in any kind of numbers: a round's words are those of steps, with no near-tie to excuse."""
    for options in ({}, {"weights": "int8"}, {"head": Head.screened}, {"weights": "int8", "cross_kv": "int8"}):
        for dtype in (torch.float32, torch.bfloat16):
            model = tiny_served("v1.1", 1, dtype)
            tokens = [each.tokens for each in engine_of(BatchRule.own, model, max_batch=1, **options).generate(texts())]
            for batch, draft in ((1, Draft(3, 3)), (5, Draft(2, 15)), (12, Draft(3, 4, Measure.softmax, 0.01))):
                engine = engine_of(BatchRule.own, model, max_batch=batch, **options)
                assert [each.tokens for each in engine.generate(texts(), draft=draft)] == tokens


@pytest.mark.parametrize("head", [Head.candidates, Head.screened], ids=lambda head: head.value)
def test_thin_heads_verify_with_every_word(head: Head) -> None:
    engine = engine_of(BatchRule.own, max_batch=4, head=head, head_k=4)
    for number, answer in enumerate(engine.generate(texts(), draft=Draft(3, 4))):
        Tally().compare(answer, told(number, "full"))


KINDS = ("softmax", "agreement-2", "static", "state", "full")


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.auto])
def test_mates_of_every_kind_do_not_mind(rule: BatchRule) -> None:
    engine = engine_of(rule, max_batch=6)
    answers: dict[str, Answer] = {}
    for number in range(12):
        if number % 2:
            draft = DRAFTS[(number // 2) % len(DRAFTS)]
            engine.add_request(rows()[number].source, draft=draft, name=f"r{number}")
        else:
            kind = KINDS[(number // 2) % len(KINDS)]
            policy = policy_for(kind, f"r{number}", number)
            engine.add_request(rows()[number].source, policy=policy, name=f"r{number}")
        if number % 3 == 0:
            answers.update({answer.id: answer for answer in engine.step().answers})
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    tally = Tally()
    for number in range(12):
        kind = "full" if number % 2 else KINDS[(number // 2) % len(KINDS)]
        tally.compare(answers[f"r{number}"], told(number, kind))
    tally.check()


@pytest.mark.parametrize("limit", [1, 2, 3, LENGTH])
def test_a_limit_is_never_passed(limit: int) -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    for draft in (Draft(1, 4), Draft(3, 15)):
        for number, answer in enumerate(engine.generate(texts(), draft=draft, max_tokens=limit)):
            Tally().compare(answer, told(number, "full"), limit=limit)
            assert len(answer.tokens) <= limit
            assert answer.drafted <= answer.rounds * (limit - 1)


def test_eos_may_be_ignored_by_some_of_a_round() -> None:
    plain = engine_of(BatchRule.own, max_batch=4).generate(texts(), policy=Full(), ignore_eos=True)
    options = [RequestOptions(draft=Draft(3, 4), ignore_eos=bool(number % 2)) for number in range(12)]
    answers = engine_of(BatchRule.own, max_batch=4).generate(texts(), options)
    ends = full()
    for number, answer in enumerate(answers):
        assert answer.tokens == (plain if number % 2 else ends)[number].tokens
    assert any(len(each.tokens) > len(end.tokens) for each, end in zip(plain, ends, strict=True))


def test_stops_end_an_answer_inside_a_round() -> None:
    plain = full()
    engine = engine_of(BatchRule.own, max_batch=4)
    told_before = {}
    for number, answer in enumerate(plain):
        place = len(answer.tokens) // 2
        token = answer.tokens[place]
        first = answer.tokens.index(token)
        told_before[f"r{number}"] = answer.tokens[: first + 1]
        engine.add_request(texts()[number], draft=Draft(3, 15), stop_ids=frozenset({token}), name=f"r{number}")
    found: dict[str, Answer] = {}
    while engine.has_work:
        found.update({answer.id: answer for answer in engine.step().answers})
    assert {name: answer.tokens for name, answer in found.items()} == told_before
    assert {answer.reason for answer in found.values()} <= {Reason.stop, Reason.eos}


def test_a_cancelled_row_leaves_the_round() -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    names = [engine.add_request(text, draft=Draft(1, 1)) for text in texts(4)]
    answers = {answer.id: answer for answer in engine.step().answers}
    assert engine.abort(names[0])
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    assert answers[names[0]].status is Status.cancelled
    for number, name in enumerate(names[1:], start=1):
        Tally().compare(answers[name], told(number, "full"))


def test_a_row_that_breaks_its_round_fails_alone() -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    rounds = engine.turns.rounds
    assert rounds is not None

    def broken(asked: Any, draft: Draft) -> list[Round]:
        if any(row.id == "poison" for row in asked):
            raise RuntimeError("no such luck\n in a second line")
        return rounds(asked, draft)

    engine.turns.rounds = broken  # type: ignore[assignment]
    for number, text in enumerate(texts(3)):
        engine.add_request(text, draft=Draft(2), name=f"r{number}")
    engine.add_request(texts(4)[3], draft=Draft(2), name="poison")
    answers: dict[str, Answer] = {}
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    assert answers["poison"].status is Status.failed
    assert answers["poison"].error == "no such luck in a second line"
    for number in range(3):
        Tally().compare(answers[f"r{number}"], told(number, "full"))


def test_bad_numbers_fail_their_row_alone() -> None:
    sound = tiny_served()
    tensors = {name: tensor.clone() for name, tensor in sound.spec.tensors.items()}
    tensors["embed"][sound.spec.start_token_id] = float("nan")
    broken: ServedModel = replace(sound, spec=replace(sound.spec, tensors=tensors), _packed={})
    engine = engine_of(BatchRule.own, broken, max_batch=2)
    for answer in engine.generate(texts(2), draft=Draft(2)):
        assert answer.status is Status.failed
        assert answer.error == "the logits are not finite"
    assert not engine.slots.taken


def test_steps_record_their_layers() -> None:
    engine = engine_of(BatchRule.own, max_batch=1)
    engine.add_request(texts()[0], draft=Draft(1, 2))
    record = engine.step().record
    assert record is not None
    assert record.rule is None
    # three positions by one layer, one after another, then three more layers on all of them
    rows_of_layers = record.layers
    assert len(rows_of_layers) == 6
    assert rows_of_layers[:3] == (1, 1, 1)
    assert set(rows_of_layers[3:]) == {3} or models.RUNNER is RunnerName.eager


@pytest.mark.parametrize(
    ("draft", "line"),
    [
        (Draft(4), "leaves|outside|left"),
        (Draft(1, PLACES), f"above the {PLACES - 1} words"),
    ],
)
def test_what_cannot_be_drafted_is_refused(draft: Draft, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        engine_of(BatchRule.own).add_request("a", draft=draft)


@pytest.mark.parametrize(
    "options",
    [{"policy": Full()}, {"tolerance": 0.05}, {"threshold": 0.5}, {"temperature": 1.0}, {"min_tokens": 1}],
    ids=str,
)
def test_a_draft_goes_with_greedy_full_depth_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="draft"):
        RequestOptions(draft=Draft(1), **options)


def test_the_graph_runner_says_that_it_drafts_nothing() -> None:
    engine = Engine(tiny_served(), runner=RunnerName.graph, max_batch=2, rule=BatchRule.own)
    with pytest.raises(ConfigError, match="runner=native or eager"):
        engine.add_request("a", draft=Draft(1))


def test_accepted_and_said() -> None:
    assert accepted([3, 4, 5], [3, 4, 6, 7]) == 2
    assert accepted([], [9]) == 0
    assert accepted([3, 1], [3, 1]) == 2
    assert said([3, 4, 5], [3, 4, 6, 7], 1) == (3, 4, 6)
    assert said([3, 1], [3, 1], 1) == (3, 1)


def test_streams_show_whole_rounds() -> None:
    engine = engine_of(BatchRule.own, max_batch=2)
    text = "".join(engine.stream(texts()[0], draft=Draft(3, 4)))
    assert text == full(count=1)[0].text
