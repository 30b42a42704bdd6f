"""The simulator against the engine: the same layers, step for step; and the time that a measured table predicts."""

import random
import statistics
import time
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.config import BatchRule, Measure, RunnerName
from calm.cost import CostTable, backfilling, checking
from calm.errors import ConfigError
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from calm.policies import Replay
from calm.rules import Rule
from calm.sim_rows import SimRow, Trace
from calm.simulate import SimEngine
from serve.accounting import RUNNER_PHASES
from serve.engine import Engine
from serve.measure import measure, measure_check, setting_of
from serve.model import ServedModel, served
from tests.scripted import id_tokenizer, random_t5
from tests.serve import models
from tests.serve.models import LENGTH, confident, texts, tiny_served, usual

pytestmark = pytest.mark.usefixtures("each_runner")
RULES = {
    "own": Rule(BatchRule.own),
    "compact": Rule(BatchRule.compact),
    "rebatch": Rule(BatchRule.rebatch, company=2, max_age=3),
    "rebatch-wide": Rule(BatchRule.rebatch, company=4, max_age=2),
    "sync": Rule(BatchRule.sync),
    "quantile": Rule(BatchRule.quantile, share=0.6),
    "lockstep": Rule(BatchRule.lockstep),
}
LAYERS = 4


class Free(CostTable):
    """A table in which nothing costs anything: for what is independent of time."""

    def at(self, name: str, size: int = 1) -> float:
        return 0.0


def engine_for(rule: Rule, max_batch: int, model: ServedModel | None = None, **named: object) -> Engine:
    return Engine(
        model or tiny_served(), rule=rule.name, quantile=rule.share, company=rule.company, max_age=rule.max_age,
        max_batch=max_batch, runner=models.RUNNER, **named,
    )  # fmt: skip


class Both:
    """An engine and its simulation that are told the same."""

    def __init__(self, engine: Engine, rule: Rule, table: CostTable) -> None:
        self.engine = engine
        self.simulated = SimEngine(table, setting_of(engine), rule)
        self.rows: dict[str, SimRow] = {}
        self.steps: list[tuple[object, object]] = []
        self.answers: dict[str, object] = {}

    def add(self, name: str, depths: tuple[int, ...], source: int) -> None:
        ids = [3 + source % 7] * (1 + source % 16)
        self.engine.add_request(ids, name=name, policy=Replay({name: depths}), max_tokens=len(depths), ignore_eos=True)
        self.rows[name] = self.simulated.add(Trace(depths, len(ids), key=str(ids)))

    def step(self) -> None:
        assert self.engine.has_work == self.simulated.has_work
        real, foretold = self.engine.step(), self.simulated.step()
        self.answers |= {answer.id: answer for answer in real.answers}
        record = real.record
        assert record is not None
        essence = ("rows", "tokens", "layers", "parked", "admitted", "encoder_calls")
        assert {key: getattr(record, key) for key in essence} == {key: getattr(foretold, key) for key in essence}
        self.steps.append((record, foretold))

    def finish(self) -> None:
        while self.engine.has_work or self.simulated.has_work:
            self.step()
        for name, row in self.rows.items():
            answer = self.answers[name]
            assert answer.executed_layers == tuple(row.executed)
            assert answer.emission_layers == tuple(row.emission)
            assert answer.parked == row.parked


depths = st.lists(st.integers(1, LAYERS), min_size=1, max_size=LENGTH).map(tuple)
bursts = st.lists(st.tuples(depths, st.integers(0, 40)), max_size=7)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12, deadline=None)
@given(
    first=bursts.filter(bool), second=bursts, pause=st.integers(0, 6), max_batch=st.integers(1, 6),
    cached=st.sampled_from([0, 2, 64]), calls=st.integers(1, 2),
)  # fmt: skip
def test_simulator_and_engine_run_the_same_layers(
    rule: str, first: list, second: list, pause: int, max_batch: int, cached: int, calls: int
) -> None:
    """Any requests in two bursts: every step runs the same layers at the same batch size, every token is as deep."""
    engine = engine_for(
        RULES[rule], max_batch, cross_cache_rows=cached, prefill_calls=calls, prefill_rows=2, source_multiple=4
    )
    both = Both(engine, RULES[rule], Free({}))
    for i, (row, source) in enumerate(first):
        both.add(f"first-{i}", row, source)
    for _ in range(pause):
        if engine.has_work:
            both.step()
    for i, (row, source) in enumerate(second):
        both.add(f"second-{i}", row, source)
    both.finish()


def test_recorded_crossings_foretell_the_work_of_confident_rows() -> None:
    """What rows did alone under a threshold says which layers run when they are served together."""
    policy = confident(Measure.softmax, usual(Measure.softmax))
    alone = Engine(tiny_served(), max_batch=1, runner=models.RUNNER).generate(texts(), policy=policy)
    assert len({layer for answer in alone for layer in answer.crossing_layers}) >= 3
    for rule in (RULES["own"], RULES["compact"], *([] if models.RUNNER is RunnerName.graph else [RULES["rebatch"]])):
        engine = engine_for(rule, 5)
        engine.generate(texts(), policy=policy)
        simulated = SimEngine(Free({}), setting_of(engine), rule)
        for answer, text in zip(alone, texts(), strict=True):
            ids = engine.model.to_ids(text)
            simulated.add(Trace(answer.crossing_layers, len(ids), key=str(ids)))
        foretold = []
        while simulated.has_work:
            foretold.append(simulated.step().layers)
        assert [record.layers for record in engine.clock.history] == foretold
        assert {record.rule for record in engine.clock.history} == {rule.name}


# the table of a machine


def test_a_table_has_every_entry_that_a_simulation_asks(each_runner: RunnerName) -> None:
    engine = Engine(tiny_served(), max_batch=5, runner=each_runner)
    table = measure(engine, repeats=2, measures=[{Measure.softmax}], lengths=[3, 16])
    sizes = [1, 2, 4, 5] if each_runner is RunnerName.eager else [1, 2, 3, 4, 5]  # the native runner has no buckets
    by_bucket = ["start", "layer", "layer_gathered", "pack", "merge", "part", "head", "read", "stay"]
    by_bucket += [checking(()), checking([Measure.softmax]), checking([Measure.softmax], first=True)]
    by_bucket += [backfilling(layers) for layers in (1, 2, 3)]
    for name in by_bucket:
        assert list(table.seconds[name]) == sizes, name
    assert set(table.seconds["join"]) >= set(sizes[1:])
    assert list(table.seconds["encode"]) == [16]  # both lengths are padded to it
    for name in ("admit", "end", "move", "row", "step"):
        assert table.at(name) >= 0.0
    assert table.at("layer", 5) > 0.0 and table.repeats == 2 and table.environment["threads"] == 1
    assert CostTable.from_json(table.to_json()) == table


def test_measuring_leaves_the_engine_as_it_was() -> None:
    policy = confident(Measure.softmax, usual(Measure.softmax))
    rule = BatchRule.compact if models.RUNNER is RunnerName.graph else BatchRule.rebatch
    engine = Engine(tiny_served(), rule=rule, company=2, max_batch=4, poison=True, runner=models.RUNNER)
    expected = [answer.tokens for answer in engine.generate(texts(), policy=policy)]
    exits, steps = engine._exits, engine.clock.steps
    measure(engine, repeats=1)
    assert engine.slots.free == 4 and not engine.has_work and engine.clock.steps == steps
    assert (
        bool(engine.slots.keys[:, :4].contiguous().view(torch.float32).isnan().all()) and not exits.present
    )  # what is freed is spoiled
    assert bool((exits.thresholds == float("inf")).all()) and not exits.depths.any()
    assert [answer.tokens for answer in engine.generate(texts(), policy=policy)] == expected


def test_a_busy_engine_is_not_measured_but_a_check_is() -> None:
    engine, undisturbed = (Engine(tiny_served(), max_batch=4, poison=True, runner=models.RUNNER) for _ in range(2))
    policy = confident(Measure.state, usual(Measure.state))
    for each in (engine, undisturbed):
        for text in texts(4):
            each.add_request(text, policy=policy)
        each.step()
    with pytest.raises(ConfigError, match="idle engine"):
        measure(engine)
    found = measure_check(engine.machine, frozenset({Measure.state, Measure.softmax}), repeats=1)
    assert (
        list(found["check:softmax+state"]) == list(found["first_check:softmax+state"]) == list(engine.machine.buckets)
    )
    while engine.has_work:
        assert engine.step().tokens == undisturbed.step().tokens
    with pytest.raises(ConfigError, match="repeats"):
        measure(engine, repeats=0)


# time: that of the processor, of which other programs take nothing


@cache
def demo_sized(times: int = 1) -> ServedModel:
    """A random model of the shape of conf/model/tiny.yaml, or so many times as wide."""
    width = 128 * times
    hf = random_t5(seed=3, tied=True, vocabulary=400, d_model=width, heads=4, encoder_layers=1, decoder_layers=8)
    settings = EarlyExitSettings(
        exit_layers=list(range(1, 8)), max_source_tokens=64, max_target_tokens=64, has_classifier=False
    )
    return served(EarlyExitT5(hf, id_tokenizer(400), settings).eval())


def some_depths(draw: random.Random, longest: int) -> tuple[int, ...]:
    """Mostly shallow, now and then to the top."""
    return tuple(min(8, 1 + int(draw.expovariate(0.35))) for _ in range(draw.randint(longest // 4, longest)))


def ask(engine: Engine, rows: list[tuple[int, ...]]) -> None:
    for number, depths in enumerate(rows):
        name = f"{engine.clock.steps}-{number}"
        source = [3 + number % 300] * 20
        engine.add_request(
            source, name=name, policy=Replay({name: depths}), max_tokens=len(depths), ignore_eos=True
        )  # fmt: skip


def decoding(records: list[Any]) -> float:
    return sum(seconds for record in records for phase, seconds in record.seconds.items() if phase != "prefill")


@pytest.mark.slow
@pytest.mark.not_graph  # on a CPU it computes what nobody asks, so that its time says nothing
@pytest.mark.parametrize("name", [rule.value for rule in BatchRule if rule is not BatchRule.auto])
def test_predicted_decode_time_is_within_a_tenth(name: str, each_runner: RunnerName) -> None:
    """Table, run, table, run, ...: the median of the ratios. A moment in which others have the caches is no bias."""
    wide = 1 if each_runner is RunnerName.eager else 3  # the native runner is through a tiny model in no time
    rule = Rule(BatchRule(name), share=0.7, company=4, max_age=4)
    engine = Engine(
        demo_sized(wide), rule=rule.name, quantile=rule.share, company=rule.company, max_age=rule.max_age, max_batch=8,
        cross_cache_rows=0, runner=models.RUNNER,
    )  # fmt: skip
    engine.clock.now = time.thread_time
    draw = random.Random(0)
    rows = [some_depths(draw, 20) for _ in range(24)]

    def turn() -> float:
        table = measure(engine, repeats=1, measures=(), lengths=[20])
        ask(engine, rows)
        records = []
        while engine.has_work:
            records.append(engine.step().record)
        foretold = SimEngine(table, setting_of(engine), rule).run([Trace(depths, 20) for depths in rows])
        assert [step.layers for step in foretold.steps] == [record.layers for record in records if record]
        return decoding(list(foretold.steps)) / decoding(records)

    for _ in range(3):
        ratios = [turn() for _ in range(11)]
        ratio = statistics.median(ratios)
        print(f"{name}: predicted / measured = {ratio:.3f} of {[round(each, 2) for each in ratios]}")
        if abs(ratio - 1.0) < 0.10:
            break
    assert abs(ratio - 1.0) < 0.10


def typical(model: ServedModel, measure: Measure) -> float:
    """A threshold that half of a measure's confidences reach."""
    engine = Engine(model, max_batch=8, record_confidences=True, cross_cache_rows=0)
    off = confident(measure, 1.0)
    answers = engine.generate([[3 + number] * 20 for number in range(8)], policy=off, max_tokens=10, ignore_eos=True)
    return statistics.median(c for answer in answers for token in answer.confidences for c in token if c == c)


@pytest.mark.not_graph
@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [(Measure.softmax,), (Measure.state,), (Measure.softmax, Measure.state)], ids=lambda each: "+".join(each)
)
@pytest.mark.parametrize("name", [BatchRule.own, BatchRule.compact], ids=lambda rule: rule.value)
def test_predicted_time_of_checks_is_within_a_tenth(
    name: BatchRule, asked: tuple[Measure, ...], each_runner: RunnerName
) -> None:
    """Confidences decide; what the rows did is then replayed with the costs of their measures."""
    model, rule = demo_sized(1 if each_runner is RunnerName.eager else 3), Rule(name)
    policies = [confident(measure, typical(model, measure)) for measure in asked]
    engine = Engine(model, rule=name, max_batch=8, cross_cache_rows=0, runner=each_runner)
    engine.clock.now = time.thread_time
    sets = [*({measure} for measure in asked), set(asked)]

    def turn(number: int) -> tuple[float, set[int]]:
        """Predicted by measured time of some requests, and how deep their tokens went."""
        table = measure(engine, repeats=1, measures=sets, lengths=[20])
        for i in range(24):
            policy, source = policies[i % len(asked)], [3 + (24 * number + i) % 300] * 20
            engine.add_request(source, name=str(i), policy=policy, max_tokens=5 + i % 16, ignore_eos=True)
        records, crossings = [], {}
        while engine.has_work:
            step = engine.step()
            records.append(step.record)
            crossings |= {int(answer.id): answer.crossing_layers for answer in step.answers}
        traces = [Trace(crossings[i], 20, measures=frozenset({policies[i % len(asked)].measure})) for i in range(24)]
        foretold = SimEngine(table, setting_of(engine), rule).run(traces)
        assert [step.layers for step in foretold.steps] == [record.layers for record in records if record]
        found = decoding(list(foretold.steps)) / decoding(records)
        return found, {depth for trace in traces for depth in trace.depths}

    ratio, depths = 0.0, set[int]()
    for attempt in range(3):  # of a machine that does something else
        turns = [turn(11 * attempt + number) for number in range(11)]
        ratio, depths = statistics.median(each for each, _ in turns), set[int]().union(*(layers for _, layers in turns))
        print(f"{name.value}: predicted / measured = {ratio:.3f} of {[round(each, 2) for each, _ in turns]}")
        if abs(ratio - 1.0) < 0.10:
            break
    assert len(depths) > 2 and abs(ratio - 1.0) < 0.10


@pytest.mark.slow
@pytest.mark.parametrize("each_runner", [RunnerName.eager], indirect=True)  # the engine below is eager
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact], ids=lambda rule: rule.value)
def test_a_step_is_spent_in_the_runner(rule: BatchRule) -> None:
    """32 rows that come and go. What would make the share smaller is left out: confidences and the encoder."""
    engine = Engine(demo_sized(), rule=rule, max_batch=32, cross_cache_rows=0, runner=RunnerName.eager)
    engine.clock.now = time.thread_time
    draw = random.Random(0)
    ask(engine, [some_depths(draw, 60) for _ in range(128)])
    shares = []
    while engine.has_work:
        record = engine.step().record
        assert record is not None
        outside = sum(seconds for phase, seconds in record.seconds.items() if phase not in RUNNER_PHASES)
        assert record.outside_runner == pytest.approx(outside / record.total)
        if record.rows == 32:
            shares.append(outside / (record.total - record.seconds.get("prefill", 0.0)))
    assert len(shares) > 50
    print(f"{rule.value}: outside the runner {statistics.median(shares):.2%} of a step of 32 rows")
    assert statistics.median(shares) < 0.05
