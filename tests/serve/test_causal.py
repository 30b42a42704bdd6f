"""The engine over decoder-only models: row-exact rules against decode_one, whatever the mates, blocks and policies."""

import pytest

from calm.config import BatchRule
from serve.requests import Status

from .causal_models import SHAPES, causal_engine, causal_served, mixed, policy_for, rows, told
from .models import EXACT
from .near_ties import Tally


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_policies_equal_decode_one(shape: str, rule: BatchRule, max_batch: int) -> None:
    """Every kind of policy side by side; sources of all lengths."""
    engine, tally = causal_engine(rule, causal_served(shape), max_batch=max_batch), Tally()
    asked = [(number % 12, kind) for number, kind in enumerate(sorted(mixed(shape)))]
    for place, (number, kind) in enumerate(asked):
        name = f"r{place}"
        engine.add_request(rows()[number].source, policy=policy_for(kind, name, number, shape), name=name)
    while engine.has_work:
        for answer in engine.step().answers:
            number, kind = asked[int(answer.id[1:])]
            assert answer.status is Status.finished, answer
            tally.compare(answer, told(number, kind, shape))
    tally.check()
    assert not engine.slots.taken and engine.slots.blocks.free == engine.slots.blocks.count
