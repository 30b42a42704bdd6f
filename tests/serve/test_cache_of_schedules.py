"""Rows that skip layers have blocks for what they run and for nothing else: each step, preempted or not."""

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Preempt
from calm.errors import ConfigError
from calm.layer_schedule import LayerSchedule
from calm.policies import Full, Policy, SkipSchedule, Static
from serve.engine import Engine
from serve.paged import EMPTY, NOWHERE
from serve.requests import Row, Status

from .causal_models import LAYERS, LENGTH, SHAPES, causal_engine, causal_served, policy_for, rows, texts
from .causal_models import told as told_of
from .near_ties import Tally
from .test_bands import SCHEDULES, schedule_policy, told
from .test_preempt import HOW, flat

SIZE = 2
POLICIES: dict[str, Policy] = {
    **{name: SkipSchedule(schedule) for name, schedule in SCHEDULES.items()},
    "fivefold": SkipSchedule(LayerSchedule(1, 1, 4)),
    "static": Static(2),
    "full": Full(),
}


def ran(policy: Policy, step: int) -> set[int]:
    """Layers of which the step's keys and values are kept."""
    if isinstance(policy, SkipSchedule) and step:
        return set(policy.schedule.layers(step, LAYERS))
    return set(range(1, policy.layer + 1 if isinstance(policy, Static) and step else LAYERS + 1))


def blocks_of(row: Row, size: int = SIZE) -> int:
    """Blocks for a prompt, which every layer reads, and for the tokens that were read again."""
    taken = 0
    for layer in range(1, LAYERS + 1):
        positions = row.length + sum(layer in ran(row.policy, step) for step in range(1, row.step))
        taken += -(-positions // size)
    return taken


def has_what_it_ran(engine: Engine) -> bool:
    held = sum(blocks_of(row) for row in engine._running)
    return held == engine.slots.num_blocks_used == int((engine.slots.table != EMPTY).sum())


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_are_those_of_the_layers_that_ran(name: str) -> None:
    engine = causal_engine(BatchRule.own, max_batch=3, block_size=SIZE)
    for number in range(5):
        engine.add_request(texts()[number], policy=POLICIES[name], ignore_eos=True)
    seen = 0
    while engine.has_work:
        engine.step()
        assert has_what_it_ran(engine)
        seen = max(seen, engine.slots.num_blocks_used)
    assert seen and not engine.slots.num_blocks_used and engine.slots.blocks.free == engine.slots.num_blocks


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.rebatch], ids=lambda rule: rule.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_left_out_is_never_read(shape: str, rule: BatchRule) -> None:
    """What is written of nothing is NaN, and what is read of nothing would outweigh every key and value."""
    engine, tally = causal_engine(rule, causal_served(shape), max_batch=5, block_size=SIZE), Tally()
    kinds = ["schedule", "static", "full", "schedule-bottom", "softmax", "schedule"]
    for number in range(12):
        kind = kinds[number % 6]
        engine.add_request(rows()[number].source, policy=policy_for(kind, "", number, shape), name=f"r{number}")
    while engine.has_work:
        for pool in (engine.slots.keys, engine.slots.values):
            pool[NOWHERE], pool[EMPTY] = float("nan"), 1e6
        for answer in engine.step().answers:
            number = int(answer.id[1:])
            assert answer.status is Status.finished, answer
            tally.compare(answer, told_of(number, kinds[number % 6], shape))
        assert bool((engine.slots.keys[EMPTY] == 1e6).all())
    tally.check()
    assert not engine.slots.num_blocks_used


def test_a_rule_that_takes_rows_beyond_their_depth_keeps_every_layer() -> None:
    """Beside a deeper mate a row speaks from above its own depth, and its next token reads that."""
    engine = causal_engine(BatchRule.sync, max_batch=2, block_size=SIZE)
    for number, policy in enumerate((Static(2), Static(3))):
        engine.add_request(texts()[number], policy=policy, ignore_eos=True)
    for _ in range(4):
        engine.step()
    used = [-(-(row.length + row.step - 1) // SIZE) * LAYERS for row in engine._running]
    assert engine.slots.num_blocks_used == sum(used)


SHORT = min(range(12), key=lambda number: len(texts()[number].split()))
DEEP = LAYERS * -(-(len(causal_served().to_ids(texts()[SHORT])) + LENGTH - 1) // SIZE)  # its blocks at full depth


def ended_at_once(policy: Policy) -> tuple[int, Engine]:
    """Answers of full length that ended at one step, in a cache without room for two of full depth."""
    engine = causal_engine(BatchRule.own, max_batch=6, block_size=SIZE, cache_blocks=2 * DEEP - 1)
    alone = causal_engine(BatchRule.own, max_batch=1)
    (expected,) = alone.generate([texts()[SHORT]], policy=policy, ignore_eos=True)
    for _ in range(6):
        engine.add_request(texts()[SHORT], policy=policy, ignore_eos=True)
    most = 0
    while engine.has_work:
        answers = engine.step().answers
        assert {answer.tokens for answer in answers} <= {expected.tokens}
        most = max(most, len(answers))
    return most, engine


def test_more_rows_of_a_schedule_run_in_the_same_memory() -> None:
    most, engine = ended_at_once(Full())
    assert most == 1 and engine.preemption.count
    for name, least in (("linear", 2), ("bottom", 2), ("static", 2), ("fivefold", 4)):
        most, _ = ended_at_once(POLICIES[name])
        assert most >= least, name


def test_a_pool_without_room_for_full_depth_serves_rows_of_a_schedule() -> None:
    engine, tally = causal_engine(BatchRule.own, max_batch=4, block_size=SIZE, cache_blocks=DEEP - 1), Tally()
    with pytest.raises(
        ConfigError, match=f"need {DEEP} blocks of 2 positions of a layer, and the cache has {DEEP - 1}"
    ):
        engine.add_request(texts()[SHORT], policy=Full())
    for answer in engine.generate([texts()[SHORT]] * 5, policy=schedule_policy("linear")):
        assert answer.status is Status.finished
        tally.compare(answer, told(SHORT, "linear", "llama"))
    assert tally.ties == 0


@HOW
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
def test_a_row_comes_back_to_the_blocks_that_it_had(name: str, preempt: Preempt) -> None:
    engine = causal_engine(BatchRule.own, preempt=preempt, max_batch=2, block_size=SIZE)
    engine.add_request(texts()[2], policy=POLICIES[name], name="a", ignore_eos=True)
    for _ in range(8):
        engine.step()
    row = engine.row("a")
    assert row is not None
    before, used = engine.slots.source_of(row.slot, row.step - 1), blocks_of(row)
    assert engine.slots.num_blocks_used == used
    assert sum(part.shape[1] for part in before[0]) < LAYERS * (row.length + row.step - 1)
    engine.preemption.keep(row)
    engine._vacate(row)
    row.slot, row.status = -1, Status.waiting
    engine._waiting.put_back([row])
    assert engine.slots.num_blocks_used == 0
    kept = sum(part.nbytes for part in flat(before))
    assert engine.preemption.held_bytes == (kept if preempt is Preempt.swap else 0)
    engine.slots.keys[NOWHERE] = engine.slots.values[NOWHERE] = float("nan")
    engine._admit()
    written = engine.slots.source_of(row.slot, row.step - 1)
    for left, right in zip(flat(before), flat(written), strict=True):
        assert left.shape == right.shape
        if preempt is Preempt.swap:
            assert torch.equal(left, right)
        else:
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    engine.step()
    assert has_what_it_ran(engine)


def test_a_replay_runs_the_layers_that_the_steps_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = causal_engine(BatchRule.own, preempt=Preempt.replay, max_batch=2, block_size=SIZE)
    policy = SkipSchedule(LayerSchedule(2, 2, 4))
    engine.add_request(texts()[2], policy=policy, name="a", ignore_eos=True)
    for _ in range(6):
        engine.step()
    row, called = engine.row("a"), list[int]()
    run = engine.machine.runner.layer

    def layer(number: int, *given: Tensor) -> Tensor:
        called.append(number)
        out: Tensor = run(number, *given)
        return out

    monkeypatch.setattr(engine.machine.runner, "layer", layer)
    assert row is not None
    engine.preemption._rerun(row, row.slot)
    assert set(called) == {1, 4}
