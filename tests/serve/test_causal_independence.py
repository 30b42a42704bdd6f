"""Within one bucket a decoder-only row is the same to the bit, whoever its mates are, how long they are, and whether it
was preempted and copied back.
"""

from functools import cache

import pytest
import torch

from calm.config import BatchRule, Measure, Preempt
from calm.policies import Policy
from serve.engine import Engine
from serve.model import ServedModel, served
from serve.requests import Answer
from tests.calm.comparing import confident, usual
from tests.causal import early_llama, random_llama

from .causal_models import LAYERS, causal

BUCKET = 8
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTHS = (1, 3, 16, 7, 12, 2, 15, 5)  # of prompts: from one block to seven, those of the answers included
POLICIES: dict[Measure, Policy] = {
    measure: confident(measure, usual(causal(), measure)) for measure in (Measure.softmax, Measure.state)
}


@cache
def model(dtype: torch.dtype) -> ServedModel:
    return served(early_llama(random_llama(seed=1).to(dtype)))


def prompt(number: int) -> list[int]:
    return [3 + (number * 17 + place * 5) % 90 for place in range(LENGTHS[number])]


def bits(answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...], list[bytes]]:
    seen = [torch.tensor(each).numpy().tobytes() for each in answer.confidences]
    return answer.tokens, answer.crossing_layers, seen


def answers(engine: Engine, numbers: list[int], policy: Policy) -> dict[int, Answer]:
    for number in numbers:
        engine.add_request(prompt(number), policy=policy, name=str(number), ignore_eos=True)
    found: dict[int, Answer] = {}
    while engine.has_work:
        found |= {int(answer.id): answer for answer in engine.step().answers}
    return found


def one_bucket(dtype: torch.dtype, rule: BatchRule, **options: object) -> Engine:
    return Engine(
        model(dtype), rule=rule, max_batch=BUCKET, buckets=(BUCKET,), block_size=4, poison=True,
        record_confidences=True, prefill_calls=BUCKET, **options,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("measure", POLICIES, ids=lambda each: each.value)
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact], ids=lambda each: each.value)
def test_a_row_is_what_it_is_alone_to_the_bit(rule: BatchRule, measure: Measure, dtype: torch.dtype) -> None:
    policy = POLICIES[measure]
    alone = {n: bits(answers(one_bucket(dtype, rule), [n], policy)[n]) for n in range(BUCKET)}
    for order in (list(range(BUCKET)), list(range(BUCKET))[::-1], [5, 2, 0]):
        together = answers(one_bucket(dtype, rule), order, policy)
        assert {n: bits(answer) for n, answer in together.items()} == {n: alone[n] for n in order}
    assert len({layer for _, crossing, _ in alone.values() for layer in crossing}) >= 3


@DTYPES
def test_a_row_that_was_copied_out_and_back_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    policy, numbers = POLICIES[Measure.softmax], list(range(BUCKET))
    calm = answers(one_bucket(dtype, BatchRule.compact), numbers, policy)
    pressed = one_bucket(dtype, BatchRule.compact, preempt=Preempt.swap, cache_blocks=10 * LAYERS)
    found = answers(pressed, numbers, policy)
    assert pressed.preemption.count >= 2
    assert {n: bits(answer) for n, answer in found.items()} == {n: bits(answer) for n, answer in calm.items()}
