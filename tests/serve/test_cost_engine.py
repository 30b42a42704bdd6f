"""The simulator against the engine: the same layers, step for step; and the time that a measured table predicts."""

import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.config import BatchRule, Measure
from calm.cost import CostTable, backfilling, checking
from calm.errors import ConfigError
from calm.policies import Replay
from calm.rules import Rule
from calm.simulate import SimEngine, SimRow, Trace
from serve.accounting import RUNNER_PHASES
from serve.engine import Engine
from serve.measure import measure, measure_check, setting_of
from tests.serve.models import LENGTH, VOCABULARY, confident, texts, tiny_served, usual

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


def engine_for(rule: Rule, max_batch: int, **named: object) -> Engine:
    return Engine(
        tiny_served(), rule=rule.name, quantile=rule.share, company=rule.company, max_age=rule.max_age,
        max_batch=max_batch, **named,
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
    alone = Engine(tiny_served(), max_batch=1).generate(texts(), policy=policy)
    assert len({layer for answer in alone for layer in answer.crossing_layers}) >= 3
    for rule in (RULES["own"], RULES["compact"], RULES["rebatch"]):
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


@pytest.fixture(scope="module")
def table() -> CostTable:
    return measure(Engine(tiny_served(), max_batch=5), repeats=2, measures=[{Measure.softmax}], lengths=[3, 16])


def test_a_table_has_every_entry_that_a_simulation_asks(table: CostTable) -> None:
    by_bucket = ["start", "layer", "layer_gathered", "pack", "merge", "part", "head", "read", "stay"]
    by_bucket += [checking(()), checking([Measure.softmax]), checking([Measure.softmax], first=True)]
    by_bucket += [backfilling(layers) for layers in (1, 2, 3)]
    for name in by_bucket:
        assert list(table.seconds[name]) == [1, 2, 4, 5], name
    assert list(table.seconds["join"]) == [2, 4, 5]
    assert list(table.seconds["encode"]) == [16]  # both lengths are padded to it
    for name in ("admit", "end", "move", "row", "step"):
        assert table.at(name) >= 0.0
    assert table.at("layer", 5) > 0.0 and table.repeats == 2 and table.environment["threads"] == 1
    assert CostTable.from_json(table.to_json()) == table


def test_measuring_leaves_the_engine_as_it_was() -> None:
    policy = confident(Measure.softmax, usual(Measure.softmax))
    engine = Engine(tiny_served(), rule=BatchRule.rebatch, company=2, max_batch=4, poison=True)
    expected = [answer.tokens for answer in engine.generate(texts(), policy=policy)]
    keys, exits = engine.slots.keys[:, :4].isnan().all(), engine.machine.exits
    steps = engine.clock.steps
    assert keys  # everything freed is spoiled
    measure(engine, repeats=1)
    assert engine.slots.free == 4 and not engine.has_work and engine.clock.steps == steps
    assert engine.slots.keys[:, :4].isnan().all() and not exits.present
    assert bool((exits.thresholds == float("inf")).all()) and not exits.depths.any()
    assert [answer.tokens for answer in engine.generate(texts(), policy=policy)] == expected


def test_a_busy_engine_is_not_measured_but_a_check_is() -> None:
    engine, undisturbed = (Engine(tiny_served(), max_batch=4, poison=True) for _ in range(2))
    policy = confident(Measure.state, usual(Measure.state))
    for each in (engine, undisturbed):
        for text in texts(4):
            each.add_request(text, policy=policy)
        each.step()
    with pytest.raises(ConfigError, match="idle engine"):
        measure(engine)
    found = measure_check(engine.machine, frozenset({Measure.state, Measure.softmax}), repeats=1)
    assert list(found["check:softmax+state"]) == list(found["first_check:softmax+state"]) == [1, 2, 4]
    while engine.has_work:
        assert engine.step().tokens == undisturbed.step().tokens
    with pytest.raises(ConfigError, match="repeats"):
        measure(engine, repeats=0)
