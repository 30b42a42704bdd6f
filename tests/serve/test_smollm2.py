"""The engine on a real decoder-only model: Hugging Face's greedy answers by every exact way, preempted or not."""

from calm.config import BatchRule, Measure, Preempt
from calm.cost import CostTable
from calm.drafting import Draft
from calm.near_ties import Reference
from calm.policies import Confident, Full
from calm.records import Example
from calm.thresholds import ThresholdSchedule
from serve.engine import Engine
from serve.model import served
from serve.options import RequestOptions
from tests.calm.test_causal import greedy
from tests.smollm2 import TEXTS, smollm2, smollm2_test

from .near_ties import Tally

OFF = Confident(Measure.softmax, ThresholdSchedule(1.0))
WAYS = (
    RequestOptions(policy=Full()),
    RequestOptions(policy=OFF),
    RequestOptions(draft=Draft(28, 3)),
    RequestOptions(draft=Draft(20, 4, Measure.softmax, 0.2)),
)


@smollm2_test
def test_every_exact_way_is_hugging_faces_greedy_answer() -> None:
    model = smollm2()
    rows = [Example(f"t{number}", f"t{number}", text, "") for number, text in enumerate(TEXTS)]
    told = [Reference(model).tell(row, Full()) for row in rows]
    assert [each.trace.tokens for each in told] == [greedy(model.hf, model, row, 24) for row in rows]
    sources, tally, preempted = list(TEXTS) * len(WAYS), Tally(), 0
    options = [way for way in WAYS for _ in TEXTS]
    for batch, blocks, preempt in ((1, None, Preempt.swap), (8, None, Preempt.swap), (8, 20 * 30, Preempt.replay)):
        engine = Engine(
            served(model), rule=BatchRule.own, costs=CostTable({}), max_batch=batch, block_size=8, cache_blocks=blocks,
            preempt=preempt,
        )  # fmt: skip
        for number, answer in enumerate(engine.generate(sources, options)):
            tally.compare(answer, told[number % len(TEXTS)])
        preempted += engine.preemption.count
    tally.check(depths=1)
    assert preempted


@smollm2_test
def test_exits_of_mixed_batches_equal_decode_one() -> None:
    model, policy = smollm2(), Confident(Measure.state, ThresholdSchedule(0.97))
    model.settings.exit_layers = list(range(1, 30))
    engine, tally = Engine(served(model), rule=BatchRule.compact, costs=CostTable({}), max_batch=4), Tally()
    for text, answer in zip(TEXTS, engine.generate(TEXTS, policy=policy), strict=True):
        tally.compare(answer, Reference(model).tell(Example("t", "t", text, ""), policy))
    tally.check()
