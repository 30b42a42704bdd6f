"""The cache of a decoder-only model: K and V in blocks of so many positions of one layer, which a row gets as it grows.

A row has a table of its blocks by layer; position p of a layer stands in the layer's block p // size, at p % size. A
layer has blocks for the positions that its row's policy lets it write, and none for others. Two blocks belong to
nobody: one that is read where a table has no block and is never written, and one that is written where nothing is kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from calm.errors import ConfigError
from calm.models.base import DecoderSpec

from .blocks import BlockPool
from .extent import Extent
from .slots import SlotError, SlotPool

# K or V of a row by layer; a prompt's, equally many positions of each, are one tensor
ByLayer = Float[Tensor, "layers kv_heads positions d_kv"] | Sequence[Float[Tensor, "kv_heads positions d_kv"]]
EMPTY, NOWHERE, OWNED = 0, 1, 2  # blocks: what is read of nothing, what is written of nothing, the first of the pool


@dataclass(frozen=True)
class Pages:
    """How a paged cache is cut.

    Attributes:
        size: positions of a block.
        count: blocks; None: enough for every slot at the model's full length and depth.
    """

    size: int
    count: int | None = None


@dataclass
class Held:
    """What a slot has of the pool.

    Attributes:
        extent: of its row.
        ends: by layer, blocks that the row needs at most.
        blocks: by layer, those that it has.
        room: the last step that these are enough for.
    """

    extent: Extent
    ends: list[int]
    blocks: list[list[int]]
    room: int = -1

    @property
    def all_blocks(self) -> list[int]:
        return list(chain.from_iterable(self.blocks))

    @property
    def growing(self) -> int:
        """Layers that the row's next steps may take a block for; they do so all at one step."""
        return sum(len(own) < end for own, end in zip(self.blocks, self.ends, strict=True))

    def missing(self, blocks: int) -> list[int]:
        """By layer, those that it has to get where its row's last position is in so many blocks."""
        return [min(blocks, end) - len(own) for own, end in zip(self.blocks, self.ends, strict=True)]


class PagedSlots(SlotPool):
    """K/V of at most ``count`` rows in one pool of blocks.

    Attributes:
        keys, values: (blocks, KV heads, size, d_kv).
        table: (count + 1, L, blocks of a row at full length); EMPTY where the layer has none.
        stops: (count + 1, L); the last step that writes the layer; -1 of the slot that is nobody's.
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
        self.size, self.num_layers = pages.size, spec.num_layers
        most = self._needed(max_source + max_target - 1)
        blocks = count * spec.num_layers * most if pages.count is None else pages.count
        dtype = spec.tensors["1.self_k"].dtype
        shape = (OWNED + blocks, spec.num_kv_heads, self.size, spec.d_kv)
        try:
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        except (RuntimeError, MemoryError):
            size = 2 * math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"no memory for {blocks} blocks of {self.size} positions of a layer ({size:,.0f} GiB); lower "
                "cache_blocks, or max_batch"
            ) from None
        self.blocks = BlockPool(blocks, OWNED)
        self.table = torch.full((count + 1, spec.num_layers, most), EMPTY, device=device)
        self.stops = torch.full((count + 1, spec.num_layers), max_target - 1, device=device)
        self.stops[self.padding] = -1
        self.lengths = torch.ones(count + 1, dtype=torch.long, device=device)
        self.said = torch.zeros((count + 1, spec.d_model), dtype=spec.tensors["embed"].dtype, device=device)
        self.turn = 0
        self._held: dict[int, Held] = {}
        if poison:
            self.keys[OWNED:] = self.values[OWNED:] = float("nan")

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

    def fit(self, rows: Sequence[tuple[Extent, int]]) -> int:
        """Keeps free what each row takes when it grows next: or who comes now would be the first to go again."""
        left = self.blocks.free - sum(held.growing for held in self._held.values())
        for count, (extent, step) in enumerate(rows[: self.free]):
            now, ends = self._blocks(extent.positions(step)), self._blocks(extent.most)
            if sum(now) > left:
                return count
            left -= sum(now) + sum(own < end for own, end in zip(now, ends, strict=True))
        return min(len(rows), self.free)

    def check(self, extent: Extent) -> None:
        needed = sum(self._blocks(extent.most))
        if needed > self.blocks.count:
            raise ConfigError(
                f"a prompt of {extent.prompt} tokens and an answer of up to {extent.limit} need {needed} blocks of "
                f"{self.size} positions of a layer, and the cache has {self.blocks.count}; lower max_tokens, shorten "
                "the prompt, or raise cache_blocks"
            )

    def take(self, extent: Extent | None = None) -> int:
        """The lowest free slot, for a row of this extent; it has no blocks yet."""
        assert extent is not None
        slot = super().take()
        nothing: list[list[int]] = [[] for _ in extent.stops]
        self._held[slot] = Held(extent, self._blocks(extent.most), nothing)
        self.lengths[slot] = extent.prompt
        self.stops[slot] = torch.tensor(extent.stops)
        return slot

    def grow(self, slot: int, step: int) -> bool:
        """Where too few blocks are free for the step, the row gets none."""
        held = self._held[slot]
        if step <= held.room:
            return True
        missing = held.missing(self._needed(held.extent.prompt + step))
        if sum(missing) > self.blocks.free:
            return False
        self._give(slot, missing)
        return True

    def put_source(
        self,
        slot: int,
        keys: ByLayer,
        values: ByLayer,
        said: Float[Tensor, " d_model"],
        step: int = 0,
    ) -> None:
        """K and V of what a row has written up to a step, by layer: of its prompt alone at step 0.

        Raises:
            SlotError: too few blocks are free.
        """
        self.said[slot] = said
        held = self._held[slot]
        self._give(slot, held.missing(self._needed(held.extent.prompt + step)))
        blocks = self._index(held.all_blocks)
        for pool, parts in ((self.keys, keys), (self.values, values)):
            pool[blocks] = self._cut(parts).to(pool)

    def source_of(self, slot: int, step: int) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
        """A copy on the host of what a row has written up to a step: what ``put_source`` takes."""
        held = self._held[slot]
        positions = held.extent.positions(step)
        counts = self._blocks(positions)
        chosen = [block for own, count in zip(held.blocks, counts, strict=True) for block in own[:count]]
        index = self._index(chosen)
        keys, values = (
            [
                part.transpose(0, 1).flatten(1, 2)[:, :length].clone()
                for part, length in zip(torch.split(pool[index].cpu(), counts), positions, strict=True)
            ]
            for pool in (self.keys, self.values)
        )
        return keys, values, self.said[slot].to("cpu", copy=True), step

    def move(self, source: int, target: int) -> None:
        """Give a row's slot up for a free one; its blocks stay where they are.

        Raises:
            SlotError: ``source`` is not taken or ``target`` is.
        """
        if source not in self._taken or target in self._taken:
            raise SlotError(f"slot {source} cannot move to {target}")
        for tensor in (self.table, self.stops, self.lengths, self.said):
            tensor[target] = tensor[source]
        self._held[target] = self._held.pop(source)
        self._taken.add(target)
        self._taken.remove(source)
        self._clear(source)

    def give_back(self, slot: int) -> None:
        super().give_back(slot)
        self.blocks.give_back(self._held.pop(slot).all_blocks)
        self._clear(slot)

    def longest_source(self, limit: int, rows: int = 1) -> int:
        """At full depth."""
        room = self.blocks.count // (rows * self.num_layers) * self.size - limit + 1
        if room < 1:
            raise ConfigError(
                f"{self.blocks.count} blocks of {self.size} positions of a layer have no room for {rows} at once with "
                f"answers of {limit} tokens from {self.num_layers} layers; raise cache_blocks"
                + (", or lower max_batch" if rows > 1 else "")
            )
        return min(self.max_source, room)

    def _needed(self, positions: int) -> int:
        return -(-positions // self.size)

    def _blocks(self, positions: Sequence[int]) -> list[int]:
        """Blocks by layer for so many positions."""
        return [self._needed(each) for each in positions]

    def _give(self, slot: int, missing: Sequence[int]) -> None:
        """So many more blocks by layer. Raises SlotError where too few are free, and gives none then."""
        held, most = self._held[slot], self.table.shape[2]
        blocks = self.blocks.take(sum(missing))
        left, places = iter(blocks), list[int]()  # in a slot's table, as one row
        for layer, (own, count) in enumerate(zip(held.blocks, missing, strict=True)):
            places += range(layer * most + len(own), layer * most + len(own) + count)
            own += islice(left, count)
        index = self._index(blocks)
        self._fill(index, 0.0)  # masked positions count as 0 * value: they must be numbers
        self.table[slot].view(-1)[self._index(places)] = index
        held.room = max(map(len, held.blocks)) * self.size - held.extent.prompt
        self.turn += 1

    def _index(self, numbers: list[int]) -> Int[Tensor, " numbers"]:
        return torch.tensor(numbers, dtype=torch.long, device=self.keys.device)

    def _cut(self, parts: ByLayer) -> Float[Tensor, "blocks kv_heads size d_kv"]:
        """The blocks of one layer after another."""
        if not isinstance(parts, Tensor):
            return torch.cat([self._cut(part[None]) for part in parts])
        layers, heads, positions, width = parts.shape
        count = self._needed(positions)
        padded = F.pad(parts, (0, 0, 0, count * self.size - positions))
        return padded.view(layers, heads, count, self.size, width).transpose(1, 2).flatten(0, 1)

    def _fill(self, blocks: Int[Tensor, " blocks"], value: float) -> None:
        self.keys.index_fill_(0, blocks, value)
        self.values.index_fill_(0, blocks, value)

    def _clear(self, slot: int) -> None:
        self.table[slot] = EMPTY
        self.stops[slot] = self.max_target - 1  # who writes here all the same finds that there is no block
        self.lengths[slot], self.said[slot] = 1, 0.0
        self.turn += 1

    def _spoil(self, slot: int) -> None:
        self._fill(self._index(self._held[slot].all_blocks), float("nan"))
