"""The row-exact rules against Hugging Face and decode_one: any batch, order, join and leave time."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from calm.confidence import CONFIDENCE
from calm.config import BatchRule, Measure, RunnerName, Schedule
from calm.models.t5 import EarlyExitT5
from calm.near_ties import Reference
from calm.policies import Full, Policy, Static
from serve.engine import Engine
from serve.model import served
from serve.native.wave import NativeWave
from serve.requests import Answer, Row, Status
from serve.wave import EngineWave
from tests.scripted import early_exit, random_t5

from . import models
from .models import (
    COUPLED,
    EXACT,
    LENGTH,
    SHAPES,
    confident,
    engine_of,
    mixed_policies,
    policy_for,
    rows,
    texts,
    tiny,
    tiny_served,
    usual,
)
from .near_ties import Tally, told

pytestmark = pytest.mark.usefixtures("each_runner")

OFF = confident(Measure.softmax, 1.0)
FULL = [
    (BatchRule.own, Full()),
    (BatchRule.own, OFF),
    (BatchRule.compact, OFF),
    (BatchRule.rebatch, Full()),
    (BatchRule.auto, OFF),
    (BatchRule.sync, Full()),
    (BatchRule.lockstep, OFF),
]
ONCE = settings(
    max_examples=10,
    phases=(Phase.generate,),  # a failing schedule is short enough as it is
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def greedy(model: EarlyExitT5, text: str) -> tuple[int, ...]:
    """Hugging Face's own greedy answer, without its start token."""
    ids = torch.tensor([[*model.tokenizer(text)["input_ids"], 1]])
    out = model.hf.generate(ids, max_new_tokens=LENGTH, do_sample=False, num_beams=1, use_cache=False)
    return tuple(out[0, 1:].tolist())


@cache
def greedy_answers(shape: str, count: int) -> list[tuple[int, ...]]:
    return [greedy(tiny(shape, seed=2), text) for text in texts(count, seed=3)]


@pytest.mark.parametrize(("rule", "policy"), FULL, ids=lambda each: getattr(each, "value", type(each).__name__))
@pytest.mark.parametrize("shape", SHAPES)
def test_full_depth_equals_hugging_face(shape: str, rule: BatchRule, policy: Policy) -> None:
    engine = engine_of(rule, tiny_served(shape, seed=2), max_batch=4)
    answers = engine.generate(texts(5, seed=3), policy=policy)
    assert [answer.tokens for answer in answers] == greedy_answers(shape, 5)
    layers = tiny(shape, seed=2).num_layers
    assert {layer for answer in answers for layer in answer.emission_layers} == {layers}
    assert all(answer.certified for answer in answers)


@pytest.mark.parametrize("layer", [1, 3])
def test_static_depth_equals_a_model_cut_there(layer: int) -> None:
    cut = random_t5(seed=1)
    cut.decoder.block = cut.decoder.block[:layer]
    cut.config.num_decoder_layers = cut.decoder.config.num_layers = layer
    short = early_exit(cut, length=LENGTH)
    expected = [greedy(short, text) for text in texts(4)]
    assert expected != [greedy(tiny(), text) for text in texts(4)]
    for rule in set((*EXACT, *COUPLED)) - ({BatchRule.rebatch} if models.RUNNER is RunnerName.graph else set()):
        engine = engine_of(rule, quantile=1.0, max_batch=4)
        assert [answer.tokens for answer in engine.generate(texts(4), policy=Static(layer))] == expected, rule


@pytest.mark.parametrize("measure", list(CONFIDENCE), ids=lambda measure: measure.value)
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_every_measure_equals_decode_one(rule: BatchRule, measure: Measure) -> None:
    shape = "deeper-decoder" if measure is Measure.softmax else "v1.1"
    policy = confident(measure, usual(measure, shape))
    engine = engine_of(rule, tiny_served(shape), max_batch=5)
    tally = Tally()
    for number, answer in enumerate(engine.generate(texts(6), policy=policy)):
        tally.compare(answer, one(shape, number, policy))
    tally.check()
    assert tally.ties == 0


@cache
def one(shape: str, number: int, policy: Policy) -> Any:
    return Reference(tiny(shape), record_confidences=True).tell(rows()[number], policy)


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_only_exit_layers_are_exits(rule: BatchRule) -> None:
    model = early_exit(random_t5(seed=1), length=LENGTH)
    model.settings.exit_layers = [2]
    engine = engine_of(rule, served(model), max_batch=4)
    policy = confident(Measure.softmax, usual(Measure.softmax))
    answers = engine.generate(texts(8), policy=policy)
    for row, answer in zip(rows(), answers, strict=False):
        Tally().compare(answer, Reference(model, record_confidences=True).tell(row, policy))
    assert {layer for answer in answers for layer in answer.crossing_layers} == {2, 4}


Event = tuple[int, str, int, int | None, int | None]
EVENTS = st.lists(
    st.tuples(
        st.integers(0, len(rows()) - 1),  # source
        st.sampled_from(sorted(mixed_policies())),
        st.integers(0, 8),  # the step before which it comes
        st.none() | st.integers(0, 12),  # steps after which it is aborted
        st.none() | st.integers(1, LENGTH),  # max_tokens
    ),
    min_size=5,
    max_size=12,
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_batch": st.integers(2, 8),
        "prefill_rows": st.integers(1, 3),
        "prefill_calls": st.integers(1, 2),
        "source_multiple": st.sampled_from([4, 16]),
        "cross_cache_rows": st.sampled_from([0, 3]),
        "company": st.integers(1, 4),
        "max_age": st.integers(1, 4),
    }
)


def play(engine: Engine, events: list[Event]) -> dict[str, Answer]:
    """Let requests come and go as the events say; the answers by request id."""
    answers: dict[str, Answer] = {}
    last = max(arrival for _, _, arrival, _, _ in events)
    for now in range(last + 40 * len(events) + 60):
        for number, (source, kind, arrival, patience, limit) in enumerate(events):
            name = f"r{number}"
            if arrival == now:
                engine.add_request(
                    rows()[source].source, policy=policy_for(kind, name, source), max_tokens=limit, name=name
                )
            if patience is not None and arrival + patience == now:
                engine.abort(name)
        for answer in engine.step().answers:
            assert answer.id not in answers
            answers[answer.id] = answer
        if now >= last and not engine.has_work:
            return answers
    raise AssertionError(f"not over after {now} steps")


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_any_schedule_equals_decode_one(rule: BatchRule) -> None:
    """Mixed policies in one batch; rows come, leave and are aborted whenever they like."""
    tally = Tally()

    @ONCE
    @given(EVENTS, SETTINGS)
    def inner(events: list[Event], chosen: dict[str, Any]) -> None:
        engine = engine_of(rule, **chosen)
        answers = play(engine, events)
        assert len(answers) == len(events)
        for number, (source, kind, _, patience, limit) in enumerate(events):
            answer = answers[f"r{number}"]
            assert answer.status is Status.finished or (patience is not None and answer.status is Status.cancelled)
            tally.compare(answer, told(source, kind), limit=limit)
            assert answer.emission_layers == answer.crossing_layers
            assert answer.involuntary == 0
        assert not engine.slots.taken

    inner()
    tally.check(depths=4)


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_rows_of_one_measure_keep_their_own_run_length(rule: BatchRule) -> None:
    events: list[Event] = [(i, kind, 0, None, None) for i in range(4) for kind in ("agreement-2", "agreement-4")]
    tally = Tally()
    answers = play(engine_of(rule, max_batch=8), events)
    for number, (source, kind, *_) in enumerate(events):
        tally.compare(answers[f"r{number}"], told(source, kind))
    tally.check()
    assert tally.ties == 0


@pytest.mark.not_graph
def test_rows_that_wait_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row waits for company while the rows beside it speak token after token, and a batch larger than they are."""
    kinds = ["static-1", "static-1", "static-1", "full"]
    monkeypatch.setitem(mixed_policies(), "static-1", Static(1))
    sources = [0, 1, 9, 6]
    events: list[Event] = [(source, kind, 0, None, None) for source, kind in zip(sources, kinds, strict=True)]
    engine = engine_of(BatchRule.rebatch, company=2, max_age=3, max_batch=4)
    answers = play(engine, events)
    assert answers["r3"].parked == len(answers["r3"].tokens)
    for number, (source, kind, *_) in enumerate(events):
        Tally().compare(answers[f"r{number}"], told(source, kind))


@pytest.mark.not_graph
def test_an_abort_leaves_the_others_that_wait_as_they_are(each_runner: RunnerName) -> None:
    """Of rows that wait for company together one goes; the others go on from where they were."""
    kinds = ["full", "agreement-4", "full", "agreement-4"]
    sources = [6, 0, 1, 9]
    events: list[Event] = [
        (source, kind, 0, 3 if number == 1 else None, None)
        for number, (source, kind) in enumerate(zip(sources, kinds, strict=True))
    ]
    engine = engine_of(BatchRule.rebatch, company=5, max_age=2, max_batch=8, prefill_rows=4)
    kind = EngineWave if each_runner is RunnerName.eager else NativeWave
    drop, waited = kind.drop, []

    def dropped(wave: Any, row: Row) -> bool:
        waited.append((row.id, [each.id for each in wave.rows]))
        return bool(drop(wave, row))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "drop", dropped)
        answers = play(engine, events)
    assert any(name == "r1" and "r1" in rows_there and len(rows_there) > 2 for name, rows_there in waited)
    assert answers["r1"].status is Status.cancelled
    for number, (source, kind, *_) in enumerate(events):
        Tally().compare(answers[f"r{number}"], told(source, kind))


@pytest.mark.not_graph
def test_rows_that_count_agreements_join_rows_that_do_not() -> None:
    events: list[Event] = [(0, "full", 0, None, None), *((i, "agreement-2", 1, None, None) for i in range(1, 4))]
    engine = engine_of(BatchRule.rebatch, company=4, max_age=8, max_batch=8)
    answers = play(engine, events)
    for number, (source, kind, *_) in enumerate(events):
        Tally().compare(answers[f"r{number}"], told(source, kind))


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_a_threshold_of_one_ignores_a_saturated_confidence(rule: BatchRule) -> None:
    model = early_exit(random_t5(seed=1), length=LENGTH)
    model.hf.lm_head.weight.data.mul_(1000)  # softmax margins of exactly 1.0
    engine = engine_of(rule, served(model), max_batch=4, record_confidences=True)
    recorded = engine.generate(texts(4), policy=confident(Measure.softmax, (1.0, 1.0, 0.5)))
    assert any(1.0 in step[:2] for answer in recorded for step in answer.confidences)
    assert {layer for answer in recorded for layer in answer.crossing_layers} <= {3, 4}
    assert 3 in {layer for answer in recorded for layer in answer.crossing_layers}
    deep = engine.generate(texts(4), policy=confident(Measure.softmax, 1.0))
    assert {layer for answer in deep for layer in answer.crossing_layers} == {4}


@pytest.mark.parametrize("rule", EXACT[:3], ids=lambda rule: rule.value)
def test_rules_differ_in_work_only(rule: BatchRule) -> None:
    policy = confident(Measure.softmax, usual(Measure.softmax), Schedule.decaying)
    answers = engine_of(rule, max_batch=6).generate(texts(6), policy=policy)
    crossing = [layer for answer in answers for layer in answer.crossing_layers]
    executed = [layer for answer in answers for layer in answer.executed_layers]
    assert all(mine >= least for mine, least in zip(executed, crossing, strict=True))
    assert (executed == crossing) is (rule is not BatchRule.own)
