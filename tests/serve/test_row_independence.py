"""Rows do not feel their mates: bit-equal within a bucket, and across buckets equal but for near-ties."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Head, Measure, RunnerName, Schedule
from calm.near_ties import Reference
from calm.policies import Policy
from serve.engine import Engine
from serve.model import ServedModel
from serve.requests import Answer
from serve.wave import Spoken

from . import models
from .models import EXACT, confident, engine_of, rows, texts, tiny, tiny_served, usual
from .near_ties import Tally

pytestmark = pytest.mark.usefixtures("each_runner")

BUCKET = 8
LOUD = 96  # a source with this id has a huge encoding
POLICIES: list[Policy] = [
    confident(Measure.softmax, usual(Measure.softmax)),
    confident(Measure.state, usual(Measure.state)),
    confident(Measure.classifier, usual(Measure.classifier), Schedule.decaying),
    confident(Measure.agreement, 0.5),
]


@cache
def loud(dtype: torch.dtype) -> ServedModel:
    """The tiny model with a source that makes activations ten thousand times as large."""
    model = tiny_served(dtype=dtype)

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model.encode(ids, mask)
        return torch.where((ids == LOUD).any(dim=1)[:, None, None], hidden * 1e4, hidden)

    return replace(model, encode=encode, encoder=None)


Seen = dict[str, list[Tensor]]


def watched(dtype: torch.dtype, rule: BatchRule, bucket: int = BUCKET, head: Head = Head.full) -> tuple[Engine, Seen]:
    """An engine of one bucket, and the hidden states that its rows spoke from."""
    engine = engine_of(
        rule, loud(dtype), max_batch=bucket, buckets=(bucket,), record_confidences=True, head=head, head_k=5
    )
    seen: Seen = {}
    take = engine._take

    def shown(spoken: Spoken) -> list[tuple[str, int]]:
        for number, row in enumerate(spoken.rows):
            seen.setdefault(row.id, []).append(spoken.states()[number].clone())
        return take(spoken)

    engine._take = shown  # type: ignore[method-assign]
    return engine, seen


def run(engine: Engine, numbers: list[int], mates: list[str]) -> dict[str, Answer]:
    """Answers to the numbered rows, each with a policy of its own, their mates among them."""
    for place, number in enumerate(numbers):
        if place < len(mates):
            engine.add_request(mates[place], policy=POLICIES[place % 4], name=f"mate{place}")
        engine.add_request(texts()[number], policy=POLICIES[number % 4], name=f"row{number}")
    answers: dict[str, Answer] = {}
    while engine.has_work:
        answers.update({answer.id: answer for answer in engine.step().answers})
    return answers


CROWDS: dict[str, Callable[[], tuple[list[int], list[str]]]] = {
    "others": lambda: ([0, 1, 5, 6], ["w20 w21", "w22", "w30 w31 w32 w33", "w40"]),
    "backwards": lambda: ([6, 5, 1, 0], []),
    "outliers": lambda: ([1, 6, 0, 5], [f"w{LOUD}", f"w7 w{LOUD}", f"w{LOUD} w{LOUD} w8", f"w9 w{LOUD}"]),
    "later": lambda: ([5, 0], [f"w{LOUD} w3"]),
}


@cache
def by_themselves(dtype: torch.dtype, runner: RunnerName) -> tuple[dict[str, Answer], Seen]:
    answers: dict[str, Answer] = {}
    hidden: Seen = {}
    for number in (0, 1, 5, 6):
        engine, seen = watched(dtype, BatchRule.own)
        answers.update(run(engine, [number], []))
        hidden.update(seen)
    return answers, hidden


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_mates_and_order(dtype: torch.dtype, rule: BatchRule, crowd: str) -> None:
    alone, alone_hidden = by_themselves(dtype, models.RUNNER)
    engine, seen = watched(dtype, rule)
    numbers, mates = CROWDS[crowd]()
    together = run(engine, numbers, mates)
    for name in (f"row{number}" for number in numbers):
        assert together[name].tokens == alone[name].tokens
        assert together[name].crossing_layers == alone[name].crossing_layers
        assert bits(together[name]) == bits(alone[name])
        for mine, own in zip(seen[name], alone_hidden[name], strict=True):
            assert torch.equal(mine, own)
    assert len({layer for answer in alone.values() for layer in answer.crossing_layers}) >= 3
    for name, answer in together.items():
        if name.startswith("mate") and crowd == "outliers":
            assert max(float(hidden.abs().max()) for hidden in seen[name]) > 1e3, answer


def bits(answer: Answer) -> list[list[str]]:
    """Confidences, NaN included."""
    return [[value.hex() for value in step] for step in answer.confidences]


NUMBERS = (0, 1, 5, 6, 9)
VARIED: list[Policy] = [
    confident(Measure.softmax, usual(Measure.softmax)),
    confident(Measure.agreement, 0.5),
    confident(Measure.max_prob, usual(Measure.max_prob), Schedule.decaying),
    confident(Measure.entropy, usual(Measure.entropy)),
    confident(Measure.state, usual(Measure.state)),
]


def among_changing_mates(engine: Engine, draw: random.Random) -> dict[str, Answer]:
    """Answers to the rows, which come in an order that chance says; others come and go beside them.

    A mate comes at each of the first steps, at a quarter of them one is aborted; every third mate is loud.
    """
    coming = {2 * place + draw.randrange(2): number for place, number in enumerate(draw.sample(NUMBERS, len(NUMBERS)))}
    answers: dict[str, Answer] = {}
    for now in itertools.count():
        if now in coming:
            number = coming[now]
            engine.add_request(texts()[number], policy=VARIED[NUMBERS.index(number)], name=f"row{number}")
        if now < 12:
            words = [f"w{draw.randrange(3, LOUD)}" for _ in range(draw.randint(1, 9))] + [f"w{LOUD}"] * (now % 3 == 0)
            policy = draw.choice(VARIED)
            engine.add_request(" ".join(words), policy=policy, max_tokens=draw.randint(1, 5), name=f"mate{now}")
        if draw.random() < 0.25:
            engine.abort(f"mate{draw.randrange(now + 1)}")
        answers.update({answer.id: answer for answer in engine.step().answers})
        if not engine.has_work and now > max(coming):
            break
    assert sum(name.startswith("mate") and bool(answer.tokens) for name, answer in answers.items()) >= 5
    return answers


@cache
def each_alone(dtype: torch.dtype, bucket: int, head: Head, runner: RunnerName) -> tuple[dict[str, Answer], Seen]:
    answers: dict[str, Answer] = {}
    hidden: Seen = {}
    for number, policy in zip(NUMBERS, VARIED, strict=True):
        engine, seen = watched(dtype, BatchRule.own, bucket, head)
        engine.add_request(texts()[number], policy=policy, name=f"row{number}")
        while engine.has_work:
            answers.update({answer.id: answer for answer in engine.step().answers})
        hidden.update(seen)
    return answers, hidden


@pytest.mark.parametrize(
    ("head", "bucket"),
    [(Head.full, 2), (Head.full, 5), (Head.full, 16), (Head.candidates, 5), (Head.screened, 5)],
    ids=lambda each: getattr(each, "value", each),
)
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_within_a_bucket_do_not_depend_on_who_comes_and_goes(
    dtype: torch.dtype, rule: BatchRule, head: Head, bucket: int
) -> None:
    """The mates of a row are others at nearly every token: its tokens, confidences and hidden states stay."""
    alone, alone_hidden = each_alone(dtype, bucket, head, models.RUNNER)
    engine, seen = watched(dtype, rule, bucket, head)
    together = among_changing_mates(engine, random.Random(f"{rule.value}-{bucket}"))
    for name, own in alone.items():
        assert together[name].tokens == own.tokens and together[name].crossing_layers == own.crossing_layers
        assert bits(together[name]) == bits(own)
        for mine, theirs in zip(seen[name], alone_hidden[name], strict=True):
            assert torch.equal(mine, theirs)
    assert len({layer for answer in alone.values() for layer in answer.crossing_layers}) >= 3


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_across_buckets_rows_differ_at_near_ties_only(rule: BatchRule, count: int) -> None:
    policy = confident(Measure.softmax, usual(Measure.softmax))
    reference = Reference(tiny(), record_confidences=True)
    crowd = rows(count, seed=31)
    sizes = (1, 3, 16)
    answers = {
        size: engine_of(rule, max_batch=size).generate([row.source for row in crowd], policy=policy) for size in sizes
    }
    tally = Tally()
    for number, row in enumerate(crowd):
        found = {(answers[size][number].tokens, answers[size][number].crossing_layers) for size in sizes}
        tally.rows += len(sizes) - 1
        tally.depths |= set(answers[1][number].crossing_layers)
        if len(found) > 1:  # only then is it worth asking decode_one who is right and how nearly
            told = reference.tell(row, policy)
            for size in sizes:
                tally.compare(answers[size][number], told)
    tally.check()
