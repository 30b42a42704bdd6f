"""The eager runner of decoder-only models: plain torch over a DecoderSpec and a paged cache.

A row attends over its own blocks, as many as its position needs, rounded up to a power of two: rows that need equally
many are one product. So what a row computes does not depend on how long its mates are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.layer_math import (
    after_attention,
    before_attention,
    embed,
    key_value,
    linear,
    logits,
    mixed,
    queries,
    turns,
)
from calm.models.base import BiasKind, DecoderSpec

from .paged import EMPTY, NOWHERE, PagedSlots
from .slots import SlotError


@dataclass(frozen=True)
class Group:
    """Rows of a bucket that attend over equally many positions.

    Attributes:
        places: of the rows in the bucket; None: all of them.
        index: by layer, heads of blocks in a cache of (blocks * KV heads) rows.
        bias: (rows, 1, 1, positions): 0 up to the row's position, -inf beyond it.
    """

    places: Int[Tensor, " rows"] | None
    index: tuple[Int[Tensor, " heads"], ...]
    bias: Float[Tensor, "rows 1 1 positions"]


@dataclass(frozen=True)
class Plan:
    """Where the rows of a bucket read and write at the positions of one step.

    Attributes:
        key: what it was made for.
        blocks, offsets: where K and V are written, blocks by layer: NOWHERE in those that keep nothing of the step.
        turn: cosines and sines of the positions; None where positions are not rotary.
    """

    key: tuple[Tensor, Tensor, int]
    positions: Int[Tensor, " batch"]
    blocks: tuple[Int[Tensor, " batch"], ...]
    offsets: Int[Tensor, " batch"]
    turn: tuple[Tensor, Tensor] | None
    groups: tuple[Group, ...]


class CausalRunner:
    """The verbs of ``Runner`` over a decoder-only model; rows are read through their tables, in any order."""

    def __init__(self, spec: DecoderSpec, slots: PagedSlots) -> None:
        self.spec, self.slots = spec, slots
        self._last: Plan | None = None

    def embed(
        self, tokens: Int[Tensor, " batch"], slots: Int[Tensor, " batch"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch d_model"]:
        return embed(self.spec, tokens, self._plan(slots, steps).positions)

    def layer(
        self,
        layer: int,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        prefix: bool = False,
    ) -> Float[Tensor, "batch d_model"]:
        plan, spec = self._plan(slots, steps), self.spec
        normed = before_attention(spec, layer, hidden)
        self._put(layer, normed, plan, plan.blocks[layer - 1])
        query = queries(spec, f"{layer}.self", normed, plan.turn)
        parts = [self._mixed(layer, query, group) for group in plan.groups]
        if len(parts) == 1:
            read = parts[0]
        else:
            read = parts[0].new_empty(query.shape[0], parts[0].shape[1])
            for group, part in zip(plan.groups, parts, strict=True):
                read[group.places] = part
        return after_attention(spec, layer, hidden + linear(spec, f"{layer}.self_o", read))

    def backfill(
        self,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        written: Int[Tensor, " batch"],
        above: int,
    ) -> None:
        plan = self._plan(slots, steps)
        for layer in range(above + 1, self.spec.num_layers + 1):
            # a row that has this layer's K/V writes nowhere
            blocks = torch.where(written < layer, plan.blocks[layer - 1], NOWHERE)
            self._put(layer, before_attention(self.spec, layer, hidden), plan, blocks)

    def logits(self, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
        return logits(self.spec, hidden)

    def told(self, flag: Bool[Tensor, ""]) -> bool:
        return bool(flag)

    def _put(self, layer: int, normed: Tensor, plan: Plan, blocks: Int[Tensor, " batch"]) -> None:
        key, value = key_value(self.spec, layer, normed, plan.turn)
        self.slots.keys[blocks, :, plan.offsets] = key
        self.slots.values[blocks, :, plan.offsets] = value

    def _mixed(self, layer: int, query: Tensor, group: Group) -> Float[Tensor, "rows inner"]:
        own = query if group.places is None else query[group.places]
        shape = (own.shape[0], self.spec.num_kv_heads, -1, self.spec.d_kv)
        keys, values = (
            pool.flatten(0, 1).index_select(0, group.index[layer - 1]).view(shape)
            for pool in (self.slots.keys, self.slots.values)
        )
        return mixed(self.spec, own, keys, values, group.bias)

    def _plan(self, slots: Tensor, steps: Tensor) -> Plan:
        """The plan of these very tensors, which a wave hands in layer after layer."""
        last = self._last
        if last is None or last.key[0] is not slots or last.key[1] is not steps or last.key[2] != self.slots.turn:
            self._last = last = self._planned(slots, steps)
        return last

    def _planned(self, slots: Tensor, steps: Tensor) -> Plan:
        pages = self.slots
        positions = pages.lengths[slots] - 1 + steps
        padding = slots == pages.padding
        kept = steps[:, None] <= pages.stops[slots]  # (B, L)
        blocks = torch.where(kept, pages.table[slots, :, positions // pages.size], NOWHERE).T.contiguous()  # (L, B)
        by_need: dict[int, list[int]] = {}
        spare = []
        for place, (position, nobody) in enumerate(zip(positions.tolist(), padding.tolist(), strict=True)):
            if nobody:
                spare.append(place)
            else:
                need = 1 << (position // pages.size).bit_length()
                by_need.setdefault(min(need, pages.table.shape[2]), []).append(place)
        by_need.setdefault(min(by_need, default=1), []).extend(spare)
        if bool((blocks == EMPTY).any()):
            raise SlotError("a row writes where it has no block")
        groups = tuple(self._group(slots, positions, sorted(by_need[need]), need) for need in sorted(by_need))
        turn = turns(self.spec, positions) if self.spec.bias_kind is BiasKind.rotary else None
        key = (slots, steps, pages.turn)
        return Plan(key, positions, blocks.unbind(), positions % pages.size, turn, groups)

    def _group(self, slots: Tensor, positions: Tensor, places: list[int], need: int) -> Group:
        device, heads, pages = slots.device, self.spec.num_kv_heads, self.slots
        every = len(places) == slots.shape[0]
        chosen = torch.tensor(places, device=device)
        own, at = (slots, positions) if every else (slots[chosen], positions[chosen])
        tables = pages.table[own, :, :need].transpose(0, 1)  # (L, rows, blocks)
        index = tables[:, :, None] * heads + torch.arange(heads, device=device)[:, None]  # (L, rows, heads, blocks)
        key_positions = torch.arange(need * pages.size, device=device)
        bias = torch.zeros((len(places), key_positions.shape[0]), dtype=pages.keys.dtype, device=device)
        bias = bias.masked_fill(key_positions > at[:, None], float("-inf"))
        return Group(None if every else chosen, index.flatten(1).unbind(), bias[:, None, None])
