"""K/V above a depth that is always the same: no token reads them, so a row-exact rule does not fill them in."""

import pytest

from calm.config import BatchRule, RunnerName
from calm.policies import Policy, Static
from serve.engine import Engine

from . import models
from .models import engine_of, policy_for, texts
from .near_ties import Tally, told

pytestmark = pytest.mark.usefixtures("each_runner")
STEPS = 3


def decoding(rule: BatchRule, *policies: Policy) -> Engine:
    """An engine after a few steps of rows that are far from their ends."""
    engine = engine_of(rule, max_batch=4, quantile=1.0)
    for number, policy in enumerate(policies):
        engine.add_request(texts()[number], policy=policy, name=f"r{number}", ignore_eos=True)
    for _ in range(STEPS):
        engine.step()
    return engine


def untouched(engine: Engine, name: str, layer: int) -> bool:
    """Whether keys of the layer at the row's first positions are as its slot was given out: 0, or NaN."""
    row = engine.row(name)
    assert row is not None
    keys = engine.slots.keys[layer - 1, row.slot]
    if models.RUNNER is RunnerName.native:
        return bool((keys == -1).all())
    return not bool(keys[:, :STEPS].any())


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.auto], ids=lambda rule: rule.value)
def test_row_exact_rules_leave_out_what_nobody_reads(rule: BatchRule) -> None:
    engine = decoding(rule, Static(2), Static(2))
    for name in ("r0", "r1"):
        assert [untouched(engine, name, layer) for layer in (1, 2, 3, 4)] == [False, False, True, True]


def test_mates_that_may_go_deeper_are_filled_in() -> None:
    engine = decoding(BatchRule.compact, Static(2), policy_for("softmax", "r1", 1))
    assert untouched(engine, "r0", 4)
    assert not untouched(engine, "r1", 4)


def test_a_batch_coupled_rule_may_need_them() -> None:
    """Beside a deeper mate a row speaks from above its own depth."""
    engine = decoding(BatchRule.sync, Static(2), Static(3))
    assert not untouched(engine, "r0", 4)


def test_a_slot_is_filled_in_again_for_its_next_row() -> None:
    engine = engine_of(BatchRule.own, max_batch=1)
    engine.generate(texts(1), policy=Static(1))
    for number, kind in ((1, "softmax"), (2, "static"), (3, "full")):
        (answer,) = engine.generate([texts()[number]], policy=policy_for(kind, "x", number))
        Tally().compare(answer, told(number, kind))
        if kind == "static":
            assert set(answer.backfilled_layers) == {0}
        if kind == "softmax":
            assert any(answer.backfilled_layers)
