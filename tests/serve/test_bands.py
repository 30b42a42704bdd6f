"""Rows with a schedule of layers: answers are those of decode_one, whoever stands at which position beside them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from calm.config import BatchRule, Preempt, RunnerName
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.layer_schedule import Decay, LayerSchedule, Side
from calm.near_ties import Reference, Told
from calm.policies import Full, Policy, SkipSchedule
from calm.serve_config import ServeConfig
from serve.bands import bands_of
from serve.engine import Engine
from serve.http.asked import CompletionRequest
from serve.http.plan import plan
from serve.requests import Answer, Status
from serve.wave import Spoken
from serve.worker import info_of

from . import causal_models, models
from .causal_models import causal, causal_engine, causal_served
from .conftest import need_native
from .models import engine_of, policy_for, rows, texts, tiny, tiny_served
from .near_ties import Tally
from .near_ties import told as told_by
from .test_preempt import HOW, SMALL

SCHEDULES = {
    "linear": LayerSchedule(4, 1, 6),
    "warm": LayerSchedule(4, 2, 5, warmup_layers=1),
    "power": LayerSchedule(3, 1, 8, decay=Decay.power),
    "bottom": LayerSchedule(4, 1, 6, side=Side.bottom),
}
EACH = pytest.mark.parametrize("name", SCHEDULES)


def schedule_policy(name: str) -> Policy:
    return SkipSchedule(SCHEDULES[name])


@cache
def told(number: int, name: str, shape: str = "v1.1") -> Told:
    """What decode_one says by a schedule."""
    if shape in models.SHAPES:
        return Reference(tiny(shape)).tell(rows()[number], schedule_policy(name))
    return Reference(causal(shape)).tell(causal_models.rows()[number], schedule_policy(name))


def compare(tally: Tally, answer: Answer, told: Told) -> None:
    assert answer.status is Status.finished, answer
    tally.compare(answer, told)
    trace, tokens = told.trace, len(answer.tokens)
    assert answer.executed_layers[:tokens] == trace.executed_layers[:tokens]
    assert set(answer.backfilled_layers) == {0} and not answer.certified


@EACH
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.not_graph
@pytest.mark.usefixtures("each_runner")
def test_schedules_equal_decode_one(name: str, batch: int) -> None:
    """Rows join while others are on their way: a step has several bands."""
    engine, tally = engine_of(BatchRule.own, max_batch=batch, prefill_calls=1, prefill_rows=1), Tally()
    for answer in engine.generate(texts(), policy=schedule_policy(name)):
        compare(tally, answer, told(int(answer.id.rpartition("-")[2]), name))
    tally.check(depths=1)
    assert not engine.slots.taken


@EACH
@pytest.mark.parametrize("shape", causal_models.SHAPES)
def test_schedules_of_decoder_only_models_equal_decode_one(name: str, shape: str) -> None:
    engine, tally = causal_engine(BatchRule.own, causal_served(shape), max_batch=4), Tally()
    for number, answer in enumerate(engine.generate(causal_models.texts(), policy=schedule_policy(name))):
        compare(tally, answer, told(number, name, shape))
    tally.check(depths=1)


@HOW
def test_a_schedule_survives_preemption(preempt: Preempt) -> None:
    few = {**SMALL, "cache_blocks": 8 * causal_models.LAYERS}
    engine, tally = causal_engine(BatchRule.own, preempt=preempt, **few), Tally()
    for number in range(12):
        name = list(SCHEDULES)[number % 4]
        engine.add_request(causal_models.rows()[number].source, policy=schedule_policy(name), name=f"r{number}")
    for answer in all_of(engine):
        number = int(answer.id[1:])
        compare(tally, answer, told(number, list(SCHEDULES)[number % 4], "llama"))
    tally.check(depths=1)
    assert engine.preemption.count >= 3


def all_of(engine: Engine) -> list[Answer]:
    found: list[Answer] = []
    while engine.has_work:
        found += engine.step().answers
    return found


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.rebatch, BatchRule.sync], ids=lambda rule: rule.value)
@pytest.mark.not_graph
@pytest.mark.usefixtures("each_runner")
def test_mates_of_every_kind_do_not_mind(rule: BatchRule) -> None:
    engine, tally = engine_of(rule, max_batch=6), Tally()
    asked: dict[str, Any] = {}
    for number in range(12):
        name = f"r{number}"
        if number % 3 == 0:
            asked[name] = told_by(number, "full")
            engine.add_request(rows()[number].source, draft=Draft(2), name=name)
        elif number % 3 == 1:
            kind = "full" if rule is BatchRule.sync else "softmax"
            asked[name] = told_by(number, kind)
            engine.add_request(rows()[number].source, policy=policy_for(kind, name, number), name=name)
        else:
            asked[name] = told(number, "linear")
            engine.add_request(rows()[number].source, policy=schedule_policy("linear"), name=name)
        engine.step() if number % 2 else None
    answers = all_of(engine)
    for answer in answers:
        tally.compare(answer, asked[answer.id])
    assert answers and tally.ties == 0


def test_native_bands_do_not_depend_on_their_rows() -> None:
    need_native()
    alone, together = (
        engine_of(BatchRule.own, max_batch=batch, runner=RunnerName.native, weights="int8").generate(
            texts(), policy=schedule_policy("warm")
        )
        for batch in (1, 12)
    )
    assert [each.tokens for each in alone] == [each.tokens for each in together]


def test_a_band_has_the_rows_that_share_its_layers() -> None:
    engine = engine_of(BatchRule.own, max_batch=4, prefill_rows=1, prefill_calls=1)
    for number in range(4):
        engine.add_request(rows()[number].source, policy=schedule_policy("linear"), name=f"r{number}", ignore_eos=True)
    for _ in range(4):
        engine.step()
    bands = bands_of(engine._running, 4)
    assert sum(len(band) for band in bands.values()) == 4
    steps = {row.step: layers for layers, band in bands.items() for row in band}
    assert len(steps) > 1
    assert steps == {step: SCHEDULES["linear"].layers(step, 4) for step in steps}
    record = engine.step().record
    assert record is not None and record.rule is None
    assert len(record.layers) == sum(len(layers) for layers in bands)


def test_a_row_that_breaks_its_band_fails_alone() -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    bands = engine.turns.bands
    assert bands is not None

    def broken(asked: Any, layers: Any) -> Spoken:
        if any(row.id == "poison" for row in asked):
            raise RuntimeError("no such luck")
        return bands(asked, layers)

    engine.turns.bands = broken
    for number in range(3):
        engine.add_request(rows()[number].source, policy=schedule_policy("linear"), name=f"r{number}")
    engine.add_request(rows()[3].source, policy=schedule_policy("linear"), name="poison")
    for answer in all_of(engine):
        if answer.id == "poison":
            assert (answer.status, answer.error) == (Status.failed, "no such luck")
        else:
            compare(Tally(), answer, told(int(answer.id[1:]), "linear"))


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_layers=6 exceeds the model's 4"):
        engine_of(BatchRule.own).add_request("a", policy=SkipSchedule(LayerSchedule(6, 1, 4)))
    with pytest.raises(ConfigError, match="skip_schedule needs runner=native or eager"):
        Engine(tiny_served(), runner=RunnerName.graph, max_batch=2, rule=BatchRule.own).add_request(
            "a", policy=schedule_policy("linear")
        )


def test_a_model_of_a_schedule_decodes_by_it_unless_asked_otherwise() -> None:
    schedule = SCHEDULES["warm"]
    engine = engine_of(BatchRule.own, replace(tiny_served(), schedule=schedule), max_batch=4)
    usual, asked, full = engine.generate(texts(1)), schedule_policy("warm"), Full()
    assert usual[0].tokens == told(0, "warm").trace.tokens == engine.generate(texts(1), policy=asked)[0].tokens
    assert engine.generate(texts(1), policy=full)[0].tokens == told_by(0, "full").trace.tokens
    assert engine.generate(texts(1), draft=Draft(1))[0].tokens == told_by(0, "full").trace.tokens


def test_the_server_tells_what_a_model_of_a_schedule_is_for() -> None:
    info, config = replace(info_of(engine_of(BatchRule.own), "m"), schedule=SCHEDULES["warm"]), ServeConfig()
    for wish in (None, {"policy": "skip_schedule"}):
        asked = CompletionRequest(model="m", prompt="a", early_exit=wish)
        assert plan(asked, info, config)[0].options.policy == schedule_policy("warm")
    asked = CompletionRequest(model="m", prompt="a", early_exit={"policy": "full"})
    assert plan(asked, info, config)[0].options.policy == Full()
