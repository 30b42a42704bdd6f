"""What the caches hold: every layer's own projection of the hidden that spoke, and nothing of who was there before."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Measure, Schedule
from calm.models.t5_adapter import RowState, T5Adapter
from calm.near_ties import Reference
from serve.engine import Engine
from serve.requests import Status
from serve.slots import Slots
from serve.wave import Spoken

from .models import COUPLED, EXACT, confident, engine_of, rows, texts, tiny, usual

COUNT = 5
POLICY = confident(Measure.softmax, usual(Measure.softmax, below=0.4), Schedule.decaying)


def watched(rule: BatchRule, see: Callable[[Engine, Spoken], None]) -> Engine:
    """An engine that shows every wave's words, its slots as they then are."""
    engine = engine_of(rule, quantile=0.6, max_batch=COUNT, prefill_calls=COUNT)
    take = engine._take

    def shown(spoken: Spoken) -> list[tuple[str, int]]:
        see(engine, spoken)
        return take(spoken)

    engine._take = shown  # type: ignore[method-assign]
    return engine


def kept(engine: Engine, layer: int, slot: int, step: int) -> tuple[Tensor, Tensor]:
    """K and V of a position, (heads, d_kv)."""
    return engine.slots.keys[layer - 1, slot, :, step], engine.slots.values[layer - 1, slot, :, step]


@pytest.mark.parametrize("rule", [*EXACT, *COUPLED], ids=lambda rule: rule.value)
def test_above_an_exit_every_layer_holds_its_own_projection(rule: BatchRule) -> None:
    adapter = T5Adapter(tiny())
    seen: list[int] = []

    def see(engine: Engine, spoken: Spoken) -> None:
        for number, row in enumerate(spoken.rows):
            for layer in range(spoken.emission[number] + 1, 5):
                keys, values = adapter.kv(layer, spoken.states()[number][None, None])
                for mine, own in zip(kept(engine, layer, row.slot, row.step), (keys, values), strict=True):
                    torch.testing.assert_close(mine, own[0, :, 0], atol=1e-5, rtol=1e-5)
            seen.append(spoken.emission[number])

    answers = watched(rule, see).generate(texts(COUNT), policy=POLICY)
    assert sorted(seen) == sorted(layer for answer in answers for layer in answer.emission_layers)
    assert len(set(seen)) >= 3


@cache
def states() -> list[RowState]:
    """What decode_one's rows hold at their end."""
    found: list[RowState] = []
    decoder = Reference(tiny())
    prefill = decoder.adapter.prefill

    def keep(source: list[int]) -> RowState:
        found.append(prefill(source))
        return found[-1]

    decoder.adapter.prefill = keep  # type: ignore[method-assign]
    decoder(rows()[:COUNT], POLICY)
    return found


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_every_layer_holds_what_decode_one_holds(rule: BatchRule) -> None:
    positions: set[tuple[int, int]] = set()

    def see(engine: Engine, spoken: Spoken) -> None:
        for row in spoken.rows:
            for layer, own in enumerate(states()[row.number].cache.self_attention_cache.layers, start=1):
                mine = kept(engine, layer, row.slot, row.step)
                torch.testing.assert_close(mine[0], own.keys[0, :, row.step], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(mine[1], own.values[0, :, row.step], atol=1e-4, rtol=1e-4)
            positions.add((row.number, row.step))

    answers = watched(rule, see).generate(texts(COUNT), policy=POLICY)
    assert len(positions) == sum(len(answer.tokens) for answer in answers)


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_without_backfill_answers_diverge(rule: BatchRule, monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine_of(rule, max_batch=COUNT, poison=False).generate(texts(COUNT), policy=POLICY)
    engine = engine_of(rule, max_batch=COUNT, poison=False)
    monkeypatch.setattr(engine.machine.runner, "backfill", lambda *arguments: None)
    wrong = engine.generate(texts(COUNT), policy=POLICY)
    assert all(answer.status is Status.finished for answer in wrong)
    assert [answer.tokens for answer in wrong] != [answer.tokens for answer in right]


def test_freed_slots_are_poisoned_and_never_read() -> None:
    engine = engine_of(BatchRule.compact, max_batch=3)
    first = engine.generate(texts(8), policy=POLICY)
    for tensor in (engine.slots.keys, engine.slots.values, engine.slots.cross_keys, engine.slots.cross_values):
        freed = tensor[:, : engine.slots.count]
        used = freed[:, :, :, :1]  # padding rows may write where nobody is
        assert used.isnan().any() and freed.isnan().float().mean() > 0.8
    again = engine.generate(texts(8), policy=POLICY)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def test_a_stale_read_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a slot that is handed on with what was in it makes every answer fail."""
    monkeypatch.setattr(Slots, "_clear", lambda self, slot: None)
    engine = engine_of(BatchRule.own, max_batch=2)
    answers = engine.generate(texts(3), policy=POLICY)
    assert {answer.status for answer in answers} == {Status.failed}
    assert {answer.error for answer in answers} == {"the logits are not finite"}
