"""What a step and a request say of their work."""

import time

import pytest

from calm.config import BatchRule, Measure
from calm.policies import Static
from serve.accounting import RUNNER_PHASES, StepRecord
from serve.requests import Answer

from .models import COUPLED, EXACT, confident, engine_of, texts, usual

POLICY = confident(Measure.softmax, usual(Measure.softmax))


@pytest.mark.parametrize("rule", [*EXACT, *COUPLED], ids=lambda rule: rule.value)
def test_layers_add_up(rule: BatchRule) -> None:
    """Of every token: where it crossed, spoke, ran and was filled; of every step: what was run for whom."""
    engine = engine_of(rule, quantile=0.6, max_batch=4, prefill_calls=4)
    for text in texts(6):
        engine.add_request(text, policy=POLICY)
    answers: list[Answer] = []
    records: list[StepRecord] = []
    while engine.has_work:
        step = engine.step()
        answers += step.answers
        assert step.record is not None
        records.append(step.record)
        assert step.record.tokens == len(step.tokens) <= step.record.rows
    for answer in answers:
        for crossing, emission, executed, backfilled in zip(
            answer.crossing_layers,
            answer.emission_layers,
            answer.executed_layers,
            answer.backfilled_layers,
            strict=True,
        ):
            assert 1 <= emission <= executed <= 4 and backfilled == 4 - emission
            assert emission == crossing if rule in EXACT else 1 <= crossing <= 4
    assert engine.clock.steps == len(records) and engine.clock.tokens == sum(len(answer.tokens) for answer in answers)
    assert list(engine.clock.history) == records
    needed = sum(layer for answer in answers for layer in answer.executed_layers)
    assert sum(sum(record.layers) for record in records) >= needed  # buckets are padded
    involuntary = sum(answer.involuntary for answer in answers)
    assert (involuntary > 0) is (rule is BatchRule.quantile)
    parked = sum(answer.parked for answer in answers)
    assert (parked > 0) is (rule in (BatchRule.rebatch, BatchRule.auto))
    assert any(record.parked for record in records) is (parked > 0)


def test_a_step_says_what_ran_on_how_many_rows() -> None:
    engine = engine_of(BatchRule.compact, max_batch=8, prefill_calls=4)
    for number, depth in enumerate((1, 1, 2, 3, 4)):
        engine.add_request(texts()[number], policy=Static(depth), max_tokens=1)
    record = engine.step().record
    assert record is not None
    assert record.layers == (8, 4, 2, 1)  # 5, 3, 2 and 1 rows in their buckets
    assert (record.rows, record.tokens, record.admitted, record.parked) == (5, 5, 5, 0)
    assert record.rule is BatchRule.compact
    own = engine_of(BatchRule.own, max_batch=8, prefill_calls=4)
    for number, depth in enumerate((1, 1, 2, 3)):
        own.add_request(texts()[number], policy=Static(depth), max_tokens=1, name=str(number))
    step = own.step()
    assert step.record is not None and step.record.layers == (4, 4, 4)
    assert {answer.executed_layers for answer in step.answers} == {(3,)}
    assert [answer.emission_layers for answer in sorted(step.answers, key=lambda a: a.id)] == [(1,), (1,), (2,), (3,)]


def test_times_are_on_one_clock() -> None:
    engine = engine_of(BatchRule.own, max_batch=2)
    before = time.perf_counter()
    answers = engine.generate(texts(5))
    after = time.perf_counter()
    for answer in answers:
        timing = answer.timing
        assert before <= timing.arrived <= timing.admitted <= timing.first_token <= timing.ended <= after
        assert timing.waited == timing.admitted - timing.arrived
    assert max(answer.timing.waited for answer in answers) > min(answer.timing.waited for answer in answers)
    spent = sum(record.total for record in engine.clock.history)
    assert 0 < spent <= after - before
    for record in engine.clock.history:
        assert all(seconds >= 0 for seconds in record.seconds.values())
        assert {"layers", "head", "read"} <= set(record.seconds)
        inside = sum(seconds for phase, seconds in record.seconds.items() if phase in RUNNER_PHASES)
        assert record.outside_runner == pytest.approx(1 - inside / record.total)


def test_a_request_that_never_ran_says_so() -> None:
    engine = engine_of(BatchRule.own, max_batch=1)
    engine.add_request(texts()[0], name="first")
    engine.add_request(texts()[1], name="second")
    engine.step()
    engine.abort("second")
    timing = next(answer for answer in engine.step().answers if answer.id == "second").timing
    assert (timing.admitted, timing.first_token) == (0.0, 0.0)
    assert timing.waited == timing.ended - timing.arrived > 0


def test_an_idle_engine_does_nothing() -> None:
    engine = engine_of(BatchRule.own, max_batch=1)
    step = engine.step()
    assert (step.tokens, step.answers, step.record) == ([], [], None)
    assert engine.clock.steps == 0


def test_confidences_are_recorded_on_demand() -> None:
    engine = engine_of(BatchRule.own, max_batch=4, record_confidences=True)
    for answer in engine.generate(texts(4), policy=POLICY):
        for crossing, confidences in zip(answer.crossing_layers, answer.confidences, strict=True):
            known = [value for value in confidences if value == value]
            assert len(confidences) == 4 and len(known) == min(crossing, 3)
            if crossing < 4:
                assert known[-1] >= POLICY.schedule.at(0, crossing)
            assert all(value < POLICY.schedule.at(0, 1) for value in known[: crossing - 1])
    assert engine_of(BatchRule.own).generate(texts(1), policy=POLICY)[0].confidences == ()
