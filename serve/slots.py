"""Where a row's K and V live: one slot per running row, reserved whole when the row is admitted.

A slot holds the self-attention K/V of every layer for all N positions, the cross-attention K/V of the source and
the source's mask. Nothing grows and nothing is concatenated. The last slot belongs to nobody: padding rows write there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from calm.errors import CalmError
from calm.models.base import DecoderSpec

from .extent import Extent


class SlotError(CalmError, RuntimeError):
    """A slot was taken or given back twice: a fault of the engine."""


class SlotPool:
    """Which of ``count`` slots are whose. Who derives from it knows what is in them.

    Attributes:
        neighbours: rows are best kept in the first slots, one beside another.
        prompted: a row's first token is said by what was read of its source.
        grows: a slot gets its memory as its row does; else it has all of it.
    """

    neighbours = True
    prompted = False
    grows = False

    def __init__(self, count: int, max_target: int, max_source: int, poison: bool) -> None:
        self.count, self.max_target, self.max_source = count, max_target, max_source
        self._poison = poison
        self._taken: set[int] = set()

    @property
    def padding(self) -> int:
        """The slot of rows that are none."""
        return self.count

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._taken)

    @property
    def free(self) -> int:
        return self.count - len(self._taken)

    @property
    def num_blocks(self) -> int:
        """Of a cache that slots share."""
        return 0

    @property
    def num_blocks_used(self) -> int:
        return 0

    @property
    def held_bytes(self) -> int | None:
        """Of K and V where slots share them; None where each has its own."""
        return None

    def fit(self, rows: Sequence[tuple[Extent, int]]) -> int:
        """How many rows, the first ones of these, may be seated now, each for its steps up to the one beside it."""
        return min(len(rows), self.free)

    def check(self, extent: Extent) -> None:
        """Raise ConfigError for a row that cannot have room at any time."""

    def grow(self, slot: int, step: int) -> bool:
        """Memory for what the row writes at this step; False where there is none."""
        return True

    def source_of(self, slot: int, step: int) -> Any:
        """A copy on the host of what a row has written up to a step, where a slot grows: as it is put there."""
        raise NotImplementedError

    def longest_source(self, limit: int, rows: int = 1) -> int:
        """Tokens of a source that so many rows have room for at once, each with an answer of at most ``limit`` tokens.

        Raises:
            ConfigError: there is not enough for any.
        """
        return self.max_source

    def take(self, extent: Extent | None = None) -> int:
        """The lowest free slot, empty.

        Args:
            extent: of the row; where a slot grows it says how far.

        Raises:
            SlotError: none is free.
        """
        for slot in range(self.count):
            if slot not in self._taken:
                self._taken.add(slot)
                self._clear(slot)
                return slot
        raise SlotError("no slot is free")

    def give_back(self, slot: int) -> None:
        """Raise SlotError when nobody has it."""
        if slot not in self._taken:
            raise SlotError(f"slot {slot} is given back but was not taken")
        self._taken.remove(slot)
        if self._poison:
            self._spoil(slot)

    def _clear(self, slot: int) -> None:
        """Nothing of a former row is left that could be read."""
        raise NotImplementedError

    def _spoil(self, slot: int) -> None:
        """Every number in it becomes NaN."""
        raise NotImplementedError


class Slots(SlotPool):
    """K/V of ``count`` rows.

    Attributes:
        keys, values: (L, count + 1, H, N, d_kv).
        cross_keys, cross_values: (L, count + 1, H, S, d_kv).
        source_bias: (count + 1, 1, 1, S): 0 on the source, -inf beyond it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        count: int,
        max_target: int,
        max_source: int,
        device: torch.device,
        poison: bool = False,
        cross_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(count, max_target, max_source, poison)
        dtype = spec.tensors["1.self_k"].dtype
        own = (spec.num_layers, count + 1, spec.num_heads, max_target, spec.d_kv)
        cross = (spec.num_layers, count + 1, spec.num_heads, max_source, spec.d_kv)
        self.keys, self.values = (torch.zeros(own, dtype=dtype, device=device) for _ in range(2))
        self.cross_keys, self.cross_values = (
            torch.zeros(cross, dtype=cross_dtype or dtype, device=device) for _ in range(2)
        )
        self.source_bias = torch.zeros((count + 1, 1, 1, max_source), dtype=dtype, device=device)
        if poison:
            for slot in range(count):
                self._spoil(slot)

    def are_free(self, slots: range) -> bool:
        """Whether all of these are slots that nobody has."""
        return slots.stop <= self.count and self._taken.isdisjoint(slots)

    def move(self, source: int, target: int) -> None:
        """Give a row's slot up for a lower free one: the rows of a batch stay neighbours, so that views need no copy.

        Raises:
            SlotError: ``source`` is not taken or ``target`` is.
        """
        if source not in self._taken or target in self._taken:
            raise SlotError(f"slot {source} cannot move to {target}")
        for tensor in (self.keys, self.values, self.cross_keys, self.cross_values):
            tensor[:, target] = tensor[:, source]
        self.source_bias[target] = self.source_bias[source]
        self._taken.add(target)
        self.give_back(source)

    def put_source(
        self,
        slot: int,
        keys: Float[Tensor, "layers heads source d_kv"],
        values: Float[Tensor, "layers heads source d_kv"],
    ) -> None:
        """Cross K/V of a source, without padding."""
        length = keys.shape[2]
        self.cross_keys[:, slot, :, :length] = keys
        self.cross_values[:, slot, :, :length] = values
        self.source_bias[slot, ..., :length] = 0.0

    def _clear(self, slot: int) -> None:
        # masked positions count as 0 * value: they must be numbers
        for tensor in (self.keys, self.values, self.cross_keys, self.cross_values):
            tensor[:, slot] = 0.0
        self.source_bias[slot] = float("-inf")

    def _spoil(self, slot: int) -> None:
        for tensor in (self.keys, self.values, self.cross_keys, self.cross_values):
            if tensor.is_floating_point():
                tensor[:, slot] = float("nan")
