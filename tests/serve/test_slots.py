"""Slots of K/V and the policies' tables beside them."""

import math

import pytest
import torch

from calm.config import Measure, Schedule
from calm.errors import ConfigError
from calm.policies import Confident, Full, Replay, Static
from calm.thresholds import ThresholdSchedule
from serve.exits import MEASURES, Exits
from serve.slots import SlotError, Slots

from .models import LENGTH, tiny_served

CPU = torch.device("cpu")


def slots(count: int = 3, poison: bool = True) -> Slots:
    return Slots(tiny_served().spec, count, LENGTH, 16, CPU, poison)


def test_slots_are_taken_lowest_first_and_once() -> None:
    pool = slots()
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.free == 0 and pool.taken == {0, 1, 2}
    with pytest.raises(SlotError, match="no slot is free"):
        pool.take()
    pool.give_back(1)
    assert pool.take() == 1
    for slot in (1, 0):
        pool.give_back(slot)
        with pytest.raises(SlotError, match=f"slot {slot} is given back but was not taken"):
            pool.give_back(slot)
    assert pool.are_free(range(0, 2)) and not pool.are_free(range(1, 3)) and not pool.are_free(range(0, 4))


def test_a_slot_is_empty_when_taken_and_poison_when_freed() -> None:
    pool = slots()
    slot = pool.take()
    assert not pool.keys[:, slot].any() and not pool.cross_values[:, slot].any()
    assert (pool.source_bias[slot] == -math.inf).all()
    pool.put_source(slot, torch.ones(4, 2, 5, 16), torch.full((4, 2, 5, 16), 2.0))
    assert pool.source_bias[slot, 0, 0].tolist() == [0.0] * 5 + [-math.inf] * 11
    assert pool.cross_keys[:, slot, :, :5].eq(1).all() and not pool.cross_keys[:, slot, :, 5:].any()
    pool.give_back(slot)
    for tensor in (pool.keys, pool.values, pool.cross_keys, pool.cross_values):
        assert tensor[:, slot].isnan().all()
    assert not pool.keys[:, pool.padding].isnan().any()


def test_moving_a_slot_takes_everything_along() -> None:
    pool = slots()
    first, second = pool.take(), pool.take()
    pool.put_source(second, torch.rand(4, 2, 3, 16), torch.rand(4, 2, 3, 16))
    pool.keys[:, second] = 7.0
    before = [tensor[:, second].clone() for tensor in (pool.keys, pool.values, pool.cross_keys, pool.cross_values)]
    with pytest.raises(SlotError, match="slot 1 cannot move to 0"):
        pool.move(second, first)
    pool.give_back(first)
    pool.move(second, first)
    after = [tensor[:, first] for tensor in (pool.keys, pool.values, pool.cross_keys, pool.cross_values)]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert pool.source_bias[first, 0, 0, :4].tolist() == [0.0, 0.0, 0.0, -math.inf]
    assert pool.taken == {first} and pool.keys[:, second].isnan().all()
    with pytest.raises(SlotError):
        pool.move(second, 2)


def exits(layers: tuple[int, ...] = (1, 3)) -> Exits:
    return Exits(tiny_served().spec, list(layers), 2, LENGTH, CPU)


def test_a_policy_becomes_tables() -> None:
    tables = exits()
    schedule = ThresholdSchedule((0.9, 0.8, 0.7), kind=Schedule.decaying, length=LENGTH)
    tables.put(0, Confident(Measure.entropy, schedule), "a")
    for step in range(LENGTH):
        row = tables.thresholds[0, step].tolist()
        assert row == [schedule.at(step, 1), math.inf, schedule.at(step, 3), math.inf]
    assert tables.present == [(Measure.entropy, 0)] and MEASURES[int(tables.measures[0])] is Measure.entropy
    tables.put(1, Replay({"b": (2, 4)}), "b")
    assert tables.depths[1].tolist() == [2, 4] + [4] * (LENGTH - 2)
    tables.put(1, Static(3), "b")
    assert tables.depths[1].tolist() == [3] * LENGTH
    tables.put(0, Confident(Measure.softmax, ThresholdSchedule(1.0)), "a")
    assert tables.depths[0].tolist() == [4] * LENGTH and tables.present == []
    with pytest.raises(ConfigError, match=r"depth 5 lies outside 1\.\.4"):
        tables.put(1, Static(5), "b")


def test_measures_are_present_while_a_row_asks_for_them() -> None:
    tables = exits()
    two, four = (Confident(Measure.agreement, ThresholdSchedule(0.5), k) for k in (2, 4))
    tables.put(0, two, "a")
    tables.put(1, four, "b")
    assert sorted(k for _, k in tables.present) == [2, 4]
    assert tables.run_lengths[:2].tolist() == [2, 4]
    tables.clear(0)
    tables.move(1, 0)
    assert tables.present == [(Measure.agreement, 4)] and tables.run_lengths.tolist() == [4, 0, 0]
    tables.put(1, four, "c")
    tables.clear(0)
    assert tables.present == [(Measure.agreement, 4)]
    tables.put(1, Full(), "d")
    assert tables.present == []
