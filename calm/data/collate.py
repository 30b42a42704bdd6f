"""Rows of ids to padded tensors, and indices to batches of like length."""

import hashlib
import random
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PAD_ID = 0


def pad(
    rows: Sequence[Sequence[int]], multiple: int = 8
) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Ids padded with 0 on the right, and a mask that is True on the rows' own ids.

    The length is rounded up to ``multiple``: few distinct shapes keep a caching allocator's memory flat.
    """
    if not rows:
        raise ValueError("pad needs at least one row")
    longest = max(1, max(len(row) for row in rows))
    length = -(-longest // multiple) * multiple
    ids = torch.full((len(rows), length), PAD_ID, dtype=torch.long)
    mask = torch.zeros((len(rows), length), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        mask[i, : len(row)] = True
    return ids, mask


def length_batches(
    lengths: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
    pool: int = 50,
    families: Sequence[str] | None = None,
) -> list[list[int]]:
    """Every index once, in batches of ``batch_size`` rows of like length (the last one may be smaller).

    With ``families``, one name per index, one index of each family instead, drawn anew for each epoch.

    A pure function of its arguments: shuffled by (seed, epoch), sorted by length within pools of ``pool``
    batches, and the batches shuffled again, so that neither rows nor lengths come in a fixed order.
    """
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    order = list(range(len(lengths)))
    rng.shuffle(order)
    if families is not None:
        order = list({families[i]: i for i in order}.values())
    batches: list[list[int]] = []
    for start in range(0, len(order), batch_size * pool):
        chunk = sorted(order[start : start + batch_size * pool], key=lambda i: lengths[i])
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    rng.shuffle(batches)
    return batches
