"""A pool of blocks that is too small for all: the newest rows go and come back, and no answer changes."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Preempt
from calm.errors import ConfigError
from serve.engine import Engine
from serve.model import served
from serve.preempt import Preemption
from serve.requests import Answer, Row, Status
from tests.causal import early_llama, random_llama

from .causal_models import LAYERS, LENGTH, causal_engine, causal_served, mixed, policy_for, rows, texts, told
from .models import EXACT, tiny_served
from .near_ties import Tally

BLOCKS = 12 * LAYERS  # one row at full length and depth needs up to ten and a half of each layer
SMALL: dict[str, Any] = dict(max_batch=6, block_size=2, cache_blocks=BLOCKS)
HOW = pytest.mark.parametrize("preempt", list(Preempt), ids=lambda how: how.value)


def answers_of(engine: Engine, kinds: Sequence[str], shape: str = "llama") -> dict[str, Answer]:
    for place, kind in enumerate(kinds):
        name = f"r{place}"
        source = rows()[place % 12].source
        engine.add_request(source, policy=policy_for(kind, name, place % 12, shape), name=name)
    found: dict[str, Answer] = {}
    while engine.has_work:
        found |= {answer.id: answer for answer in engine.step().answers}
        slots = engine.slots
        assert slots.blocks.used == sum(len(held.all_blocks) for held in slots._held.values())
    return found


@HOW
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_preempted_rows_equal_decode_one(rule: BatchRule, preempt: Preempt) -> None:
    kinds = [*sorted(mixed()), "replay", "replay", "softmax"]
    engine, tally = causal_engine(rule, preempt=preempt, **SMALL), Tally()
    for answer in answers_of(engine, kinds).values():
        number = int(answer.id[1:])
        assert answer.status is Status.finished, answer
        tally.compare(answer, told(number % 12, kinds[number]))
    tally.check(depths=4)
    assert engine.preemption.count >= 3 and not engine.preemption.held_bytes
    assert engine.slots.blocks.free == BLOCKS and not engine.slots.taken


@HOW
@pytest.mark.parametrize("shape", ["llama-one-kv-head", "opt", "opt-350m"])
def test_every_architecture_survives_preemption(shape: str, preempt: Preempt) -> None:
    kinds = sorted(mixed(shape))
    small = causal_engine(BatchRule.compact, causal_served(shape), preempt=preempt, **SMALL)
    large = causal_engine(BatchRule.compact, causal_served(shape), **{**SMALL, "cache_blocks": None})
    calm, pressed = answers_of(large, kinds, shape), answers_of(small, kinds, shape)
    assert small.preemption.count and not large.preemption.count
    for name, answer in calm.items():
        other = pressed[name]
        assert (other.tokens, other.crossing_layers, other.certified) == (
            answer.tokens,
            answer.crossing_layers,
            answer.certified,
        )


def test_a_replay_at_full_depth_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what rows did before they went is read afterwards."""
    rerun = Preemption._rerun

    def deep(self: Preemption, row: Row, slot: int) -> None:
        kept, row.emission = row.emission, [4] * row.step
        rerun(self, row, slot)
        row.emission = kept

    monkeypatch.setattr(Preemption, "_rerun", deep)
    engine = causal_engine(BatchRule.own, preempt=Preempt.replay, **SMALL)
    answers = answers_of(engine, ["replay"] * 12)
    assert any(answers[f"r{number}"].tokens != told(number, "replay").trace.tokens for number in range(12))


def flat(copy: tuple[list[Tensor], list[Tensor], Tensor, int]) -> list[Tensor]:
    keys, values, said, _ = copy
    return [*keys, *values, said]


@HOW
def test_keys_and_values_are_what_they_were(preempt: Preempt) -> None:
    """Bit for bit where they were copied; to the last bits where they were made anew."""
    engine = causal_engine(BatchRule.own, preempt=preempt, max_batch=2, block_size=4)
    engine.add_request(rows()[2].source, policy=policy_for("replay", "a", 2), name="a", ignore_eos=True)
    for _ in range(8):
        engine.step()
    row = engine.row("a")
    assert row is not None and len(set(row.emission)) >= 3
    before = engine.slots.source_of(row.slot, row.step - 1)
    engine.preemption.keep(row)
    engine._vacate(row)
    row.slot, row.status = -1, Status.waiting
    engine._waiting.put_back([row])
    assert engine.num_waiting == 1 and engine.slots.blocks.used == 0
    assert (engine.preemption.held_bytes > 0) is (preempt is Preempt.swap)
    engine._admit()
    after = engine.slots.source_of(row.slot, row.step - 1)
    for left, right in zip(flat(before), flat(after), strict=True):
        assert left.numel()
        if preempt is Preempt.swap:
            assert torch.equal(left, right)
        else:
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@HOW
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_rows_come_go_and_are_aborted_under_pressure(rule: BatchRule, preempt: Preempt) -> None:
    draw, tally = random.Random(7), Tally()
    engine = causal_engine(rule, preempt=preempt, prefill_rows=2, cross_cache_rows=2, company=3, **SMALL)
    asked: dict[str, tuple[int, str]] = {}
    answers: dict[str, Answer] = {}
    aborted: set[str] = set()
    while len(asked) < 60 or engine.has_work:
        if len(asked) < 60 and draw.random() < 0.5:
            name, number, kind = f"r{len(asked)}", draw.randrange(12), draw.choice(sorted(mixed()))
            asked[name] = number, kind
            engine.add_request(rows()[number].source, policy=policy_for(kind, name, number), name=name)
        if draw.random() < 0.04 and (alive := sorted(set(asked) - set(answers) - aborted)):
            aborted.add(alive[-1] if draw.random() < 0.5 else draw.choice(alive))
            for name in aborted & set(alive):
                engine.abort(name)
        for answer in engine.step().answers:
            answers[answer.id] = answer
        running = {row.slot for row in engine._running}
        assert running == engine.slots.taken and all(row.slot == -1 for row in engine._waiting)
    assert set(answers) == set(asked)
    for name, answer in answers.items():
        assert answer.status is (Status.cancelled if name in aborted else Status.finished)
        tally.compare(answer, told(*asked[name]))
    tally.check()
    assert engine.preemption.count >= 10 and engine.slots.blocks.free == BLOCKS and not engine.preemption.held_bytes


@HOW
def test_nobody_starves_in_a_stream_of_requests(preempt: Preempt) -> None:
    """Each new request finds the pool full of older ones; every one ends within what those before it may take."""
    engine = causal_engine(BatchRule.own, preempt=preempt, max_batch=4, block_size=2, cache_blocks=11 * LAYERS)
    begun: dict[str, int] = {}
    steps = done = 0
    while done < 40:
        if len(begun) < 40 and engine.num_waiting < 5:
            name = f"r{len(begun)}"
            engine.add_request(texts()[len(begun) % 12], name=name, ignore_eos=True)
            begun[name] = steps
        steps += 1
        for answer in engine.step().answers:
            assert answer.status is Status.finished and len(answer.tokens) == LENGTH
            assert steps - begun[answer.id] <= 12 * LENGTH, "a request waits for more than those before it"
            done += 1
    assert engine.preemption.count


def test_the_oldest_row_never_goes() -> None:
    engine = causal_engine(BatchRule.own, max_batch=4, block_size=2, cache_blocks=11 * LAYERS)
    for place in range(4):
        engine.add_request(texts()[place], name=f"r{place}", ignore_eos=True)
    while engine.has_work:
        oldest = min(engine._running, key=lambda row: row.number, default=None)
        engine.step()
        assert oldest not in list(engine._waiting)
    assert engine.preemption.count


def test_what_can_never_fit_is_refused_when_it_is_added() -> None:
    engine = causal_engine(BatchRule.own, block_size=4, cache_blocks=3 * LAYERS)
    said = "a prompt of 10 tokens and an answer of up to 12 need 24 blocks of 4 positions of a layer"
    with pytest.raises(ConfigError, match=said):
        engine.add_request(list(range(3, 13)))
    assert not engine.has_work
    fitting = engine.generate([list(range(3, 13))], max_tokens=3, ignore_eos=True)[0]
    assert fitting.status is Status.finished and len(fitting.tokens) == 3


@pytest.mark.parametrize("option", [{"block_size": 8}, {"cache_blocks": 4}, {"preempt": "replay"}], ids=str)
def test_a_model_with_an_encoder_refuses_what_is_said_of_a_paged_cache(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} is for decoder-only models.*leave {name} out"):
        Engine(tiny_served(), **option)
    Engine(tiny_served(), block_size=16, preempt="swap")  # as they are without a word


def test_certificates_of_preempted_rows_stay() -> None:
    engine = causal_engine(BatchRule.own, **SMALL)
    for text in texts(6):
        engine.add_request(text)
    answers: list[Answer] = []
    while engine.has_work:
        answers += engine.step().answers
    assert engine.preemption.count and all(answer.certified for answer in answers)


@HOW
def test_answers_that_are_longer_than_a_batch_come_back(preempt: Preempt) -> None:
    """A replay takes more positions than the largest bucket has rows."""
    model = served(early_llama(random_llama(seed=1), length=40))
    policy = mixed()["softmax"]
    small = causal_engine(BatchRule.own, model, preempt=preempt, max_batch=2, block_size=4, cache_blocks=14 * LAYERS)
    large = causal_engine(BatchRule.own, model, max_batch=2)
    calm = [answer.tokens for answer in large.generate(texts(4), policy=policy, ignore_eos=True)]
    assert [answer.tokens for answer in small.generate(texts(4), policy=policy, ignore_eos=True)] == calm
    assert small.preemption.count


def test_costs_are_measured_where_the_pool_has_no_room_for_all() -> None:
    engine = Engine(causal_served(), rule=BatchRule.rebatch, max_batch=6, block_size=2, cache_blocks=24 * LAYERS)
    assert engine.turns.choice.table is not None and not engine.slots.taken
    assert engine.slots.blocks.free == 24 * LAYERS
    answers = engine.generate(texts(4))
    assert [answer.status for answer in answers] == [Status.finished] * 4


def test_a_cache_that_no_memory_holds_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no memory for 1000000000000000 blocks of 4 positions"):
        causal_engine(BatchRule.own, cache_blocks=10**15)
    with pytest.raises(ConfigError, match="block_size must lie in"):
        causal_engine(BatchRule.own, block_size=10**12)
