"""Blocks of a paged cache: whose they are, what is in them, and that nobody reads what is not theirs."""

import pytest
import torch

from calm.errors import ConfigError
from serve.blocks import BlockPool
from serve.extent import Extent
from serve.paged import EMPTY, NOWHERE, OWNED, PagedSlots, Pages
from serve.slots import SlotError

from .causal_models import causal_served

SPEC = causal_served().spec
LAYERS, HEADS, WIDTH = SPEC.num_layers, SPEC.num_kv_heads, SPEC.d_kv
LIMIT = 12
Source = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


def paged(count: int = 3, blocks: int | None = 8, poison: bool = True) -> PagedSlots:
    """``blocks`` of each layer."""
    each = None if blocks is None else blocks * LAYERS
    return PagedSlots(SPEC, count, LIMIT, 16, torch.device("cpu"), Pages(4, each), poison)


def deep(prompt: int, limit: int = LIMIT) -> Extent:
    return Extent(prompt, limit, (limit - 1,) * LAYERS)


def source(*positions: int, value: float = 1.0) -> Source:
    """K and V of so many positions, of every layer alike unless each is given."""
    each = positions if len(positions) > 1 else positions * LAYERS
    keys = [torch.rand(HEADS, count, WIDTH) + value for count in each]
    return keys, [-part for part in keys], torch.rand(SPEC.d_model)


def seated(slots: PagedSlots, prompt: int) -> int:
    slot = slots.take(deep(prompt))
    slots.put_source(slot, *source(prompt))
    return slot


def same(left: tuple[object, ...], right: tuple[object, ...]) -> bool:
    pairs = zip(left[:3], right[:3], strict=True)
    return all(torch.equal(mine, theirs) for a, b in pairs for mine, theirs in zip(a, b, strict=True))  # type: ignore[call-overload]


def test_blocks_are_taken_lowest_first_and_given_back_once() -> None:
    pool = BlockPool(4, first=2)
    assert pool.take(4) == [2, 3, 4, 5]
    with pytest.raises(SlotError, match="1 blocks of the cache are needed and 0 are free"):
        pool.take(1)
    pool.give_back([5, 3])
    assert (pool.free, pool.used) == (2, 2)
    with pytest.raises(SlotError, match="3 blocks of the cache are needed and 2 are free"):
        pool.take(3)
    with pytest.raises(SlotError, match="block 3 is given back but was not taken"):
        pool.give_back([3])
    assert pool.take(0) == [] and pool.take(1) == [3] and pool.free == 1


def test_a_row_gets_blocks_of_every_layer_as_it_grows() -> None:
    slots = paged()
    slot = seated(slots, 5)
    assert slots.blocks.used == 2 * LAYERS
    assert slots.table[slot].tolist() == [[2 + 2 * layer, 3 + 2 * layer, *[EMPTY] * 5] for layer in range(LAYERS)]
    assert all(slots.grow(slot, step) for step in range(1, 4)) and slots.blocks.used == 2 * LAYERS
    assert slots.grow(slot, 4) and slots.blocks.used == 3 * LAYERS  # position 8 is in the third block of each
    assert slots.lengths[slot] == 5
    slots.give_back(slot)
    assert slots.blocks.used == 0 and not slots.table.any() and slots.num_blocks == 8 * LAYERS


def test_a_layer_that_stops_gets_no_more_blocks() -> None:
    slots = paged()
    extent = Extent(3, LIMIT, (11, 0, 2, 11))
    slot = slots.take(extent)
    slots.put_source(slot, *source(3))
    for step in range(1, LIMIT):
        assert slots.grow(slot, step)
        expected = [-(-(3 + min(step, stop)) // 4) for stop in extent.stops]
        assert [len(own) for own in slots._held[slot].blocks] == expected
        assert slots.blocks.used == sum(expected) == int((slots.table[slot] != EMPTY).sum())
    assert slots.stops[slot].tolist() == [11, 0, 2, 11] and (slots.stops[slots.padding] == -1).all()
    slots.give_back(slot)
    assert slots.blocks.used == 0 and (slots.stops[slot] == 11).all()


def test_a_dry_pool_says_so_and_nothing_is_taken() -> None:
    slots = paged(blocks=3)
    first, second = seated(slots, 4), seated(slots, 5)
    assert not slots.grow(first, 8) and slots.blocks.used == 3 * LAYERS
    slots.give_back(second)
    assert slots.grow(first, 8) and slots.blocks.free == 0
    third = slots.take(deep(5))
    with pytest.raises(SlotError, match="8 blocks of the cache are needed and 0 are free"):
        slots.put_source(third, *source(5))


def test_freed_blocks_are_poison_and_new_ones_are_empty() -> None:
    slots = paged()
    assert slots.keys[OWNED:].isnan().all() and not slots.keys[EMPTY].any()
    slot = seated(slots, 5)
    own = slots.table[slot, :, :2].flatten().tolist()
    assert not slots.keys[own].isnan().any() and not slots.keys[own[1::2], :, 1:].any()
    slots.give_back(slot)
    assert slots.keys[own].isnan().all() and slots.values[own].isnan().all()
    assert not slots.keys[[EMPTY, NOWHERE]].isnan().any()


def test_what_was_put_is_copied_out_to_the_bit() -> None:
    slots = paged()
    for _ in range(2):
        seated(slots, 3)
    slot = slots.take(deep(7))
    put = source(7)
    slots.put_source(slot, *put)
    assert same(slots.source_of(slot, 0), put)
    slots.give_back(slot)
    again = slots.take(deep(2))
    slots.put_source(again, *source(3), 1)  # two of its three positions are the prompt's
    assert slots.lengths[again] == 2 and slots.grow(again, 3)


def test_a_copy_is_as_ragged_as_what_was_written() -> None:
    slots = paged()
    extent = Extent(3, LIMIT, (11, 0, 2, 11))
    slot, put = slots.take(extent), source(9, 3, 5, 9)
    slots.put_source(slot, *put, 6)
    assert slots.blocks.used == 3 + 1 + 2 + 3
    copy = slots.source_of(slot, 6)
    assert same(copy, put) and [part.shape[1] for part in copy[0]] == [9, 3, 5, 9]
    assert [part.shape[1] for part in slots.source_of(slot, 1)[1]] == [4, 3, 4, 4]
    slots.give_back(slot)
    again = slots.take(extent)
    slots.put_source(again, *copy)
    assert same(slots.source_of(again, 6), put)


def test_moving_a_row_takes_its_table_along() -> None:
    slots = paged()
    first = seated(slots, 4)
    second = slots.take(Extent(6, LIMIT, (11, 0, 2, 11)))
    slots.put_source(second, *source(6))
    before = slots.source_of(second, 0)
    with pytest.raises(SlotError, match="slot 1 cannot move to 0"):
        slots.move(second, first)
    slots.give_back(first)
    slots.move(second, first)
    assert slots.taken == {first} and not slots.table[second].any()
    assert slots.stops[first].tolist() == [11, 0, 2, 11] and (slots.stops[second] == 11).all()
    assert same(before, slots.source_of(first, 0))
    slots.give_back(first)
    assert slots.blocks.used == 0


def test_what_each_row_takes_next_is_kept_free() -> None:
    slots = paged(count=4, blocks=6)

    def fit(*prompts: int) -> int:
        return slots.fit([(deep(prompt), 0) for prompt in prompts])

    assert fit(8, 8, 8, 8) == 2 and fit(24) == 1 and fit(25) == 0
    assert fit(4, 4, 12, 4) == 2 and fit(4, 4, 4, 4, 4) == 3 and fit() == 0
    assert slots.fit([(deep(4, limit=1), 0)] * 4) == 4, "rows that never grow"
    seated(slots, 8)
    assert fit(12) == 1 and fit(13) == 0
    with pytest.raises(ConfigError, match="prompt of 16 tokens and an answer of up to 10 need 28 blocks of 4 posit"):
        slots.check(deep(16, 10))
    slots.check(deep(16, 9))
    slots.check(Extent(16, 10, (9, 9, 0, 0)))
    assert slots.longest_source(9) == 16 and slots.longest_source(12) == 13


def test_rows_that_stop_early_leave_room_for_others() -> None:
    slots = paged(count=8, blocks=6)
    shallow = Extent(4, LIMIT, (11, 0, 0, 0))
    assert slots.fit([(deep(4), 0)] * 8) == 3
    assert slots.fit([(shallow, 0)] * 8) == 5 and slots.fit([(shallow, 11)] * 8) == 3
    slots.put_source(slots.take(shallow), *source(4))
    assert slots.fit([(deep(4), 0)] * 8) == 2 and slots.fit([(deep(19), 0)]) == 0 and slots.fit([(deep(16), 0)]) == 1


def test_without_a_number_every_slot_has_room_at_full_length() -> None:
    slots = paged(count=3, blocks=None, poison=False)
    for _ in range(3):
        slot = seated(slots, 16)
        assert slots.grow(slot, LIMIT - 1)
    assert slots.blocks.free == 0
