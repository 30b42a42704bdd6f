"""The simulator against the engine over decoder-only models: a prompt says the first token, layers the others."""

import pytest
from hypothesis import given, settings

from calm.config import Measure
from calm.cost import backfilling, checking
from calm.sim_rows import Trace
from calm.simulate import SimEngine
from serve.measure import measure, setting_of
from serve.paged import OWNED

from .causal_models import LAYERS, causal_engine, causal_served, mixed, texts
from .test_cost_engine import RULES, Both, Free, bursts, engine_for

SAMPLE = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("rule", RULES)
@SAMPLE
@given(first=bursts.filter(bool), second=bursts)
def test_simulator_and_engine_run_the_same_layers(rule: str, first: list, second: list) -> None:
    engine = engine_for(RULES[rule], 4, causal_served(), prefill_calls=2, prefill_rows=2, source_multiple=4)
    both = Both(engine, RULES[rule], Free({}))
    for i, (row, source) in enumerate(first):
        both.add(f"first-{i}", row, source)
    for _ in range(3):
        if engine.has_work:
            both.step()
    for i, (row, source) in enumerate(second):
        both.add(f"second-{i}", row, source)
    both.finish()


def test_recorded_crossings_foretell_the_work_of_confident_rows() -> None:
    policy = mixed()["softmax"]
    alone = causal_engine(RULES["own"].name, max_batch=1).generate(texts(), policy=policy)
    for rule in (RULES["own"], RULES["compact"]):
        engine = engine_for(rule, 5, causal_served())
        engine.generate(texts(), policy=policy)
        simulated = SimEngine(Free({}), setting_of(engine), rule)
        for answer, text in zip(alone, texts(), strict=True):
            ids = engine.model.to_ids(text)
            simulated.add(Trace(answer.crossing_layers, len(ids), key=str(ids)))
        foretold = []
        while simulated.has_work:
            foretold.append(simulated.step().layers)
        assert [record.layers for record in engine.clock.history] == foretold


def test_a_table_is_measured_on_the_paged_cache_and_leaves_it_empty() -> None:
    engine = engine_for(RULES["own"], 3, causal_served(), block_size=4, cache_blocks=18 * LAYERS, poison=True)
    table = measure(engine, repeats=1, measures=[{Measure.softmax}], lengths=[3, 16])
    for name in ("layer", "head", "read", checking([Measure.softmax]), backfilling(2), backfilling(3)):
        assert list(table.seconds[name]) == [1, 2, 3], name
    assert all(table.at(name) >= 0.0 for name in ("admit", "end", "move", "row", "step"))
    assert engine.slots.num_blocks_used == 0 and not engine.slots.taken
    assert not engine.slots.keys[:OWNED].isnan().any()
    answers = engine.generate(texts(4))
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in causal_engine(RULES["own"].name).generate(texts(4))
    ]
