"""Blocks of a paged cache: whose they are, what is in them, and that nobody reads what is not theirs."""

import pytest
import torch

from calm.errors import ConfigError
from serve.blocks import BlockPool
from serve.paged import EMPTY, NOWHERE, OWNED, PagedSlots, Pages
from serve.slots import SlotError

from .causal_models import causal_served

SPEC = causal_served().spec
LAYERS, HEADS, WIDTH = SPEC.num_layers, SPEC.num_kv_heads, SPEC.d_kv


def paged(count: int = 3, blocks: int | None = 8, poison: bool = True) -> PagedSlots:
    return PagedSlots(SPEC, count, 12, 16, torch.device("cpu"), Pages(4, blocks), poison)


def source(positions: int, value: float = 1.0) -> tuple[torch.Tensor, ...]:
    keys = torch.rand(LAYERS, HEADS, positions, WIDTH) + value
    return keys, -keys, torch.rand(SPEC.d_model)


def test_blocks_are_taken_lowest_first_and_given_back_once() -> None:
    pool = BlockPool(3, first=2)
    assert [pool.take() for _ in range(3)] == [2, 3, 4]
    with pytest.raises(SlotError, match="no block of the cache is free"):
        pool.take()
    pool.give_back([3])
    assert (pool.free, pool.used) == (1, 2)
    with pytest.raises(SlotError, match="block 3 is given back but was not taken"):
        pool.give_back([3])
    assert pool.take() == 3


def test_a_row_gets_blocks_as_it_grows() -> None:
    slots = paged()
    slot = slots.take()
    slots.put_source(slot, *source(5))
    assert slots.blocks.used == 2 and slots.table[slot].tolist() == [2, 3, *[EMPTY] * 5]
    assert all(slots.grow(slot, step) for step in range(1, 4)) and slots.blocks.used == 2
    assert slots.grow(slot, 4) and slots.blocks.used == 3  # position 8 is in its third block
    assert slots.lengths[slot] == 5
    slots.give_back(slot)
    assert slots.blocks.used == 0 and not slots.table.any() and slots.num_blocks == 8


def test_a_dry_pool_says_so_and_what_was_taken_stays() -> None:
    slots = paged(blocks=3)
    first, second = slots.take(), slots.take()
    slots.put_source(first, *source(4))
    slots.put_source(second, *source(5))
    assert not slots.grow(first, 8) and slots.blocks.used == 3
    slots.give_back(second)
    assert slots.grow(first, 8)
    third = slots.take()
    with pytest.raises(SlotError, match="no block"):
        slots.put_source(third, *source(5))


def test_freed_blocks_are_poison_and_new_ones_are_empty() -> None:
    slots = paged()
    assert slots.keys[:, OWNED:].isnan().all() and not slots.keys[:, EMPTY].any()
    slot = slots.take()
    slots.put_source(slot, *source(5))
    own = slots.table[slot, :2].tolist()
    assert not slots.keys[:, own].isnan().any() and not slots.keys[:, own[1], :, 1:].any()
    slots.give_back(slot)
    assert slots.keys[:, own].isnan().all() and slots.values[:, own].isnan().all()
    assert not slots.keys[:, [EMPTY, NOWHERE]].isnan().any()


def test_what_was_put_is_copied_out_to_the_bit() -> None:
    slots = paged()
    for _ in range(2):
        slots.put_source(slots.take(), *source(3))
    slot = slots.take()
    keys, values, said = source(7)
    slots.put_source(slot, keys, values, said)
    copy = slots.source_of(slot, 7)
    assert all(torch.equal(left, right) for left, right in zip(copy[:3], (keys, values, said), strict=True))
    slots.give_back(slot)
    again = slots.take()
    slots.put_source(again, *slots.source_of(0, 3)[:3], prompt=2)  # two of its three positions are a prompt's
    assert slots.lengths[again] == 2 and slots.grow(again, 3)


def test_moving_a_row_takes_its_table_along() -> None:
    slots = paged()
    first, second = slots.take(), slots.take()
    slots.put_source(first, *source(4))
    slots.put_source(second, *source(6))
    before = slots.source_of(second, 6)
    with pytest.raises(SlotError, match="slot 1 cannot move to 0"):
        slots.move(second, first)
    slots.give_back(first)
    slots.move(second, first)
    assert slots.taken == {first} and slots.table[second].tolist() == [EMPTY] * 7
    after = slots.source_of(first, 6)
    assert all(torch.equal(left, right) for left, right in zip(before[:3], after[:3], strict=True))
    slots.give_back(first)
    assert slots.blocks.used == 0


def test_a_block_is_kept_free_for_each_row_that_may_grow() -> None:
    slots = paged(count=4, blocks=6)
    assert slots.fit([8] * 4) == 2 and slots.fit([24]) == 1 and slots.fit([25]) == 0
    assert slots.fit([4, 4, 12, 4]) == 2 and slots.fit([4] * 5) == 3 and slots.fit([]) == 0
    slots.put_source(slots.take(), *source(8))
    assert slots.fit([12]) == 1 and slots.fit([13]) == 0
    with pytest.raises(ConfigError, match="a prompt of 16 tokens and an answer of up to 10 need 7 blocks"):
        slots.check(16, 10)
    slots.check(16, 9)
    assert slots.longest_source(9) == 16 and slots.longest_source(12) == 13


def test_without_a_number_every_slot_has_room_at_full_length() -> None:
    slots = paged(count=3, blocks=None, poison=False)
    for _ in range(3):
        slot = slots.take()
        slots.put_source(slot, *source(16))
        assert slots.grow(slot, 11)
    assert slots.blocks.free == 0
