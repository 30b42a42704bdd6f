"""The cache of a decoder-only model: K and V in blocks of so many positions, which a row gets as it grows.

A row has a table of its blocks; position p stands in the row's block p // size, at p % size. Two blocks belong to
nobody: one that is read where a table has no block and is never written, and one that is written by rows that are none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calm.errors import ConfigError
from calm.models.base import DecoderSpec

from .blocks import BlockPool
from .slots import SlotError, SlotPool

EMPTY, NOWHERE, OWNED = 0, 1, 2  # blocks: what is read of nothing, what is written of nothing, the first of the pool


@dataclass(frozen=True)
class Pages:
    """How a paged cache is cut.

    Attributes:
        size: positions of a block.
        count: blocks; None: enough for every slot at the model's full length.
    """

    size: int
    count: int | None = None


class PagedSlots(SlotPool):
    """K/V of at most ``count`` rows in one pool of blocks.

    Attributes:
        keys, values: (L, blocks, KV heads, size, d_kv).
        table: (count + 1, blocks of a row at full length); EMPTY where the row has none yet.
        lengths: (count + 1,); tokens of the row's prompt.
        said: (count + 1, d_model); last hidden of the prompt, which says the row's first token.
        blocks: which of them are free.
        turn: grows with every change of a table.
    """

    prompted = True
    grows = True

    def __init__(
        self,
        spec: DecoderSpec,
        count: int,
        max_target: int,
        max_source: int,
        device: torch.device,
        pages: Pages,
        poison: bool = False,
    ) -> None:
        super().__init__(count, max_target, max_source, poison)
        self.size = pages.size
        most = self._needed(max_source + max_target - 1)
        blocks = count * most if pages.count is None else pages.count
        dtype = spec.tensors["1.self_k"].dtype
        shape = (spec.num_layers, OWNED + blocks, spec.num_kv_heads, self.size, spec.d_kv)
        try:
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        except (RuntimeError, MemoryError):
            size = 2 * math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"no memory for {blocks} blocks of {self.size} positions ({size:,.0f} GiB); lower "
                "cache_blocks, or max_batch"
            ) from None
        self.blocks = BlockPool(blocks, OWNED)
        self.table = torch.full((count + 1, most), EMPTY, device=device)
        self.lengths = torch.ones(count + 1, dtype=torch.long, device=device)
        self.said = torch.zeros((count + 1, spec.d_model), dtype=spec.tensors["embed"].dtype, device=device)
        self.turn = 0
        self._own: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}
        if poison:
            self._fill(list(range(OWNED, OWNED + self.blocks.count)), float("nan"))

    @property
    def num_blocks(self) -> int:
        return self.blocks.count

    @property
    def num_blocks_used(self) -> int:
        return self.blocks.used

    @property
    def held_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def are_free(self, slots: range) -> bool:
        """Padding never reads a row's table: no slots are taken for it."""
        return False

    def fit(self, lengths: Sequence[int]) -> int:
        """Keeps a block free for each row that may still grow: or who comes now would be the first to go again."""
        most = self.table.shape[1]
        left = self.blocks.free - sum(len(own) < most for own in self._own.values())
        for count, length in enumerate(lengths[: self.free]):
            needed = self._needed(length)
            if needed > left:
                return count
            left -= min(needed + 1, most)
        return min(len(lengths), self.free)

    def check(self, source: int, limit: int) -> None:
        positions = source + limit - 1  # the last token is never read
        needed = self._needed(positions)
        if needed > self.blocks.count:
            raise ConfigError(
                f"a prompt of {source} tokens and an answer of up to {limit} need {needed} blocks of {self.size} "
                f"positions, and the cache has {self.blocks.count}; lower max_tokens, shorten the prompt, or raise "
                "cache_blocks"
            )

    def grow(self, slot: int, step: int) -> bool:
        return self._reach(slot, self._prompts[slot] + step)

    def put_source(
        self,
        slot: int,
        keys: Float[Tensor, "layers kv_heads positions d_kv"],
        values: Float[Tensor, "layers kv_heads positions d_kv"],
        said: Float[Tensor, " d_model"],
        prompt: int | None = None,
    ) -> None:
        """K and V of a row's first positions: of its prompt, and of more where that has ``prompt`` tokens only.

        Raises:
            SlotError: too few blocks are free.
        """
        positions = keys.shape[2]
        self._prompts[slot] = positions if prompt is None else prompt
        self.lengths[slot], self.said[slot] = self._prompts[slot], said
        if not self._reach(slot, positions):
            raise SlotError("no block of the cache is free")
        for pool, new in ((self.keys, keys), (self.values, values)):
            for place, block in enumerate(self._own[slot]):
                part = new[:, :, place * self.size : (place + 1) * self.size]
                pool[:, block, :, : part.shape[2]] = part

    def source_of(self, slot: int, positions: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """A copy on the host of what a row has in its first positions: what ``put_source`` takes."""
        keys, values = (pool[:, self._own[slot]].transpose(1, 2).flatten(2, 3) for pool in (self.keys, self.values))
        keys, values = (part[:, :, :positions].to("cpu", copy=True) for part in (keys, values))
        return keys, values, self.said[slot].to("cpu", copy=True), self._prompts[slot]

    def move(self, source: int, target: int) -> None:
        """Give a row's slot up for a free one; its blocks stay where they are.

        Raises:
            SlotError: ``source`` is not taken or ``target`` is.
        """
        if source not in self._taken or target in self._taken:
            raise SlotError(f"slot {source} cannot move to {target}")
        for tensor in (self.table, self.lengths, self.said):
            tensor[target] = tensor[source]
        self._own[target], self._prompts[target] = self._own.pop(source), self._prompts.pop(source)
        self._taken.add(target)
        self._taken.remove(source)
        self._blank(source)

    def give_back(self, slot: int) -> None:
        super().give_back(slot)
        self.blocks.give_back(self._own.pop(slot))
        del self._prompts[slot]
        self._blank(slot)

    def longest_source(self, limit: int, rows: int = 1) -> int:
        room = self.blocks.count // rows * self.size - limit + 1
        if room < 1:
            raise ConfigError(
                f"{self.blocks.count} blocks of {self.size} positions have no room for {rows} at once with answers of "
                f"{limit} tokens; raise cache_blocks" + (", or lower max_batch" if rows > 1 else "")
            )
        return min(self.max_source, room)

    def _needed(self, positions: int) -> int:
        return -(-positions // self.size)

    def _reach(self, slot: int, positions: int) -> bool:
        """Blocks for so many positions; False where too few are free, and those that were stay the row's."""
        own = self._own[slot]
        while len(own) < self._needed(positions):
            if not self.blocks.free:
                return False
            block = self.blocks.take()
            self._fill([block], 0.0)  # masked positions count as 0 * value: they must be numbers
            self.table[slot, len(own)] = block
            own.append(block)
            self.turn += 1
        return True

    def _fill(self, blocks: list[int], value: float) -> None:
        self.keys[:, blocks] = value
        self.values[:, blocks] = value

    def _blank(self, slot: int) -> None:
        self.table[slot] = EMPTY
        self.lengths[slot], self.said[slot] = 1, 0.0
        self.turn += 1

    def _clear(self, slot: int) -> None:
        self._own[slot], self._prompts[slot] = [], 1
        self._blank(slot)

    def _spoil(self, slot: int) -> None:
        self._fill(self._own[slot], float("nan"))
