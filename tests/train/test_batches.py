"""Every row once per epoch, whatever the number of processes; batches that hold what they should."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.losses import IGNORED
from calm.records import Example
from tests.train.model import tiny_model
from train.batches import Feed, Position, Share


def rows_of(count: int) -> list[Example]:
    return [Example(str(i), str(i), "a b " * (i % 5 + 1), "b" * (i % 3 + 1)) for i in range(count)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_is_every_row_once_and_a_function_of_seed(count: int, batch_size: int, seed: int) -> None:
    model = tiny_model()
    feed, again = (Feed(model, rows_of(count), batch_size, seed) for _ in range(2))
    position, batches = Position(), -(-count // batch_size)
    seen = [feed.next(position) for _ in range(batches)]
    assert sorted(row for batch in seen for row in batch) == list(range(count))
    assert position == Position(0, batches)
    following = feed.next(position)
    assert position == Position(1, 1)
    assert again.next(Position(1, 0)) == following  # a fresh process finds the same batch by its position alone
    assert again.next(Position(0, batches - 1)) == seen[-1]


def test_with_one_row_per_family_an_epoch_is_as_long_as_there_are_families() -> None:
    rows = [Example(str(i), f"family {i % 4}", "a b", "b") for i in range(12)]
    feed, position = Feed(tiny_model(), rows, 3, 0, one_per_family=True), Position()
    epochs = [[row for _ in range(2) for row in feed.next(position)] for _ in range(9)]
    assert position == Position(8, 2)
    assert all(sorted(row % 4 for row in epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert {row for epoch in epochs for row in epoch} == set(range(12))


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 3))
def test_processes_and_micro_batches_share_a_batch_without_loss(rows: int, world: int, accumulation: int) -> None:
    parts = [part for rank in range(world) for part in Share(rank, world, accumulation).micro_batches(rows)]
    assert len(parts) == world * accumulation
    assert sorted(i for part in parts for i in part) == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_batch_shifts_targets_and_masks_padding() -> None:
    model = tiny_model()
    feed = Feed(model, rows_of(2), 2, 0)
    targets = feed.targets([0, 1])
    assert [target[-1] for target in targets] == [model.eos_token_id] * 2
    batch = feed.batch([0, 1], targets)
    for row, target in enumerate(targets):
        assert batch.labels[row, : len(target)].tolist() == target
        assert (batch.labels[row, len(target) :] == IGNORED).all()
        assert batch.decoder_ids[row, : len(target)].tolist() == [model.start_token_id, *target[:-1]]
    assert batch.source_ids.shape[1] % 8 == 0 and batch.labels.shape[1] % 4 == 0
    assert batch.source_mask.dtype is torch.bool and batch.source_mask[:, 0].all()
