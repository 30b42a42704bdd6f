"""Decoder-only rows that draft: full depth's answers, whatever is drafted, beside any mates, preempted or not."""

import pytest

from calm.config import BatchRule, Measure, Preempt
from calm.drafting import Draft
from calm.policies import Full
from serve.engine import Engine
from serve.requests import Answer, Status

from .causal_models import SHAPES, causal_engine, causal_served, policy_for, rows, texts, told
from .near_ties import Tally
from .test_preempt import BLOCKS, HOW, SMALL

DRAFTS = (
    Draft(1, 4),
    Draft(2, 3),
    Draft(3, 15),
    Draft(2, 6, Measure.softmax, 0.05),
    Draft(3, 6, Measure.state, 0.8),
)
KINDS = ("full", "softmax", "static", "state", "replay")


def all_answers(engine: Engine) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while engine.has_work:
        found |= {answer.id: answer for answer in engine.step().answers}
    return found


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_draft_gives_the_answers_of_full_depth(shape: str, batch: int) -> None:
    tally, drafted, right = Tally(), 0, 0
    for draft in DRAFTS:
        engine = causal_engine(BatchRule.own, causal_served(shape), max_batch=batch)
        for number, answer in enumerate(engine.generate(texts(), draft=draft)):
            tally.compare(answer, told(number, "full", shape))
            assert answer.status is Status.finished and answer.certified
            drafted, right = drafted + answer.drafted, right + answer.accepted
        assert engine.slots.blocks.free == engine.slots.blocks.count
    tally.check(depths=1)
    assert right < drafted
    assert right or shape == "opt-350m"  # whose random layers never agree


@HOW
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_drafts_survive_preemption_beside_mates(rule: BatchRule, preempt: Preempt) -> None:
    engine, tally = causal_engine(rule, preempt=preempt, **SMALL), Tally()
    for number in range(12):
        name, source = f"r{number}", rows()[number].source
        if number % 2:
            engine.add_request(source, draft=DRAFTS[number // 2 % len(DRAFTS)], name=name)
        else:
            policy = policy_for(KINDS[number // 2 % len(KINDS)], name, number)
            engine.add_request(source, policy=policy, name=name)
    for name, answer in all_answers(engine).items():
        number = int(name[1:])
        assert answer.status is Status.finished, answer
        tally.compare(answer, told(number, "full" if number % 2 else KINDS[number // 2 % len(KINDS)]))
    tally.check()
    assert engine.preemption.count and not engine.preemption.held_bytes
    assert engine.slots.blocks.free == BLOCKS


def test_limits_hold_where_the_prompt_says_the_first_word() -> None:
    for limit in (1, 2, 5):
        engine = causal_engine(BatchRule.own, max_batch=3)
        for number, answer in enumerate(engine.generate(texts(), draft=Draft(3, 15), max_tokens=limit)):
            Tally().compare(answer, told(number, "full"), limit=limit)
    full = causal_engine(BatchRule.own, max_batch=3).generate(texts(), policy=Full(), ignore_eos=True)
    drafted = causal_engine(BatchRule.own, max_batch=3).generate(texts(), draft=Draft(2, 4), ignore_eos=True)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in full]
