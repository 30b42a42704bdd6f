"""The batch-coupled rules against plain transcriptions (tests.serve.plain_rules)."""

import pytest

from calm.config import BatchRule, Measure
from calm.policies import Policy, Static

from .models import confident, engine_of, mixed_policies, texts, tiny, usual
from .plain_rules import PLAIN, SHARE, same_as_plain

pytestmark = pytest.mark.usefixtures("each_runner")


def as_plain(rule: BatchRule, policies: list[Policy], arrivals: list[int]) -> None:
    count = len(policies)
    engine = engine_of(rule, quantile=SHARE, max_batch=count, prefill_calls=count)
    same_as_plain(tiny(), engine, texts(count), policies, arrivals)


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.classifier, Measure.entropy])
@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.value)
def test_one_policy_for_all(rule: BatchRule, measure: Measure) -> None:
    below = 0.7 if rule is BatchRule.quantile else 0.4
    as_plain(rule, [confident(measure, usual(measure, below=below))] * 4, [0, 0, 0, 0])


@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.value)
def test_rows_that_come_and_go_with_policies_of_their_own(rule: BatchRule) -> None:
    easy = confident(Measure.softmax, usual(Measure.softmax, below=0.2))
    policies = [easy, Static(2), mixed_policies()["decaying"], easy, mixed_policies()["agreement-2"], Static(1)]
    as_plain(rule, policies, [0, 0, 1, 3, 3, 12])


def test_finished_rows_count_as_crossed() -> None:
    """A deep row holds a shallow one up exactly as long as it lives."""
    engine = engine_of(BatchRule.sync, max_batch=2)
    engine.add_request(texts()[0], policy=Static(1), name="shallow")
    engine.add_request(texts()[1], max_tokens=3, name="deep")
    found = {}
    while engine.has_work:
        found.update({answer.id: answer for answer in engine.step().answers})
    assert len(found["deep"].tokens) == 3
    assert found["shallow"].emission_layers == (4, 4, 4, *[1] * 7)
    assert found["shallow"].crossing_layers == (1,) * 10
