"""What was used last is kept, within bounds of number and size."""

import random

import pytest

from calm.last_used import LastUsed


def test_who_was_not_used_for_longest_goes_first() -> None:
    kept: LastUsed[int] = LastUsed(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert "b" not in kept and kept.get("b") is None and (kept.get("a"), kept.get("c"), len(kept)) == (1, 3, 2)


def test_sizes_add_up_to_the_bound() -> None:
    kept: LastUsed[str] = LastUsed(9, 10)
    for name, size in (("a", 4), ("b", 4), ("c", 2)):
        kept.put(name, name, size)
    assert len(kept) == 3 and kept.size == 10
    kept.put("d", "d", 5)
    assert "a" not in kept and "b" not in kept and kept.size == 7
    kept.put("c", "larger", 4)
    assert kept.get("c") == "larger" and kept.size == 9


def test_what_is_larger_than_the_bound_drives_nobody_out() -> None:
    kept: LastUsed[int] = LastUsed(9, 10)
    kept.put("a", 1, 10)
    kept.put("b", 2, 11)
    assert "a" in kept and "b" not in kept and kept.size == 10
    kept.put("a", 3, 11)  # what it was before is not it any more
    assert "a" not in kept and kept.size == 0


@pytest.mark.parametrize("bounds", [(0, None), (0, 5), (3, 0)])
def test_nothing_may_be_kept(bounds: tuple[int, int | None]) -> None:
    kept: LastUsed[int] = LastUsed(*bounds)
    kept.put("a", 1, 1)
    assert not len(kept) and not kept.size


def test_the_size_is_that_of_what_is_kept() -> None:
    draw, kept, sizes = random.Random(0), LastUsed[None](5, 30), {}
    for _ in range(500):
        name, sizes_of = draw.randrange(12), draw.randint(1, 14)
        sizes[name] = sizes_of
        kept.put(name, None, sizes_of)
        kept.get(draw.randrange(12))
        assert name in kept and len(kept) <= 5
        assert kept.size == sum(size for each, size in sizes.items() if each in kept) <= 30
