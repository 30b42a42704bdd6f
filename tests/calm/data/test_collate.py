import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.data.collate import length_batches, pad


def test_pad_rounds_up_and_masks() -> None:
    ids, mask = pad([[5, 6, 1], [7, 1], [0, 3, 1]], multiple=4)
    assert ids.tolist() == [[5, 6, 1, 0], [7, 1, 0, 0], [0, 3, 1, 0]]
    assert mask.tolist() == [[True, True, True, False], [True, True, False, False], [True, True, True, False]]
    assert ids.dtype == torch.long
    assert pad([[1] * 9])[0].shape == (1, 16)
    assert pad([[]])[0].shape == (1, 8)
    with pytest.raises(ValueError, match="at least one row"):
        pad([])


@given(
    st.lists(st.integers(1, 50), max_size=80),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_each_index_once(lengths: list[int], size: int, seed: int, epoch: int, pool: int) -> None:
    batches = length_batches(lengths, size, seed, epoch, pool)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)
    assert sum(len(batch) < size for batch in batches) <= 1
    assert batches == length_batches(lengths, size, seed, epoch, pool)


def test_order_depends_on_seed_and_epoch_and_lengths_are_alike() -> None:
    lengths = [(i * 37) % 97 + 1 for i in range(1000)]
    first = length_batches(lengths, 10, 0, 0)
    assert first != length_batches(lengths, 10, 0, 1) and first != length_batches(lengths, 10, 1, 0)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in first)
    assert padded < 1.1 * sum(lengths)
    means = [sum(lengths[i] for i in batch) / 10 for batch in first]
    assert means != sorted(means)


def test_order_is_the_same_on_every_machine() -> None:
    assert length_batches([3, 1, 2, 5, 4], 2, 7, 1) == [[1, 2], [0, 4], [3]]


def test_one_row_of_each_family_and_another_one_each_epoch() -> None:
    families = [f"f{i % 10}" for i in range(30)]
    epochs = [length_batches([1] * 30, 4, 0, epoch, families=families) for epoch in range(20)]
    for batches in epochs:
        rows = [i for batch in batches for i in batch]
        assert sorted(families[i] for i in rows) == sorted(set(families))
        assert [len(batch) for batch in batches].count(4) == 2
    assert {i for batches in epochs for batch in batches for i in batch} == set(range(30))
