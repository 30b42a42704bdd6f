"""Decoder layers of a padded batch at several positions of each row at once, every row at positions of its own.

Over the caches of calm.batch_layers and calm.batch_causal, which know one position, the same for all rows. Rows share
kernels, never attention; a query sees its row's positions up to its own, those of this pass included. To all else
(calm.layer_math) each position is a row.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .batch_causal import CausalLayers
from .batch_layers import BatchCaches, BatchLayers
from .layer_math import after_attention, before_attention, embed, key_value, linear, norm, queries, turns
from .models.base import BiasKind


class WideLayers:
    """Any decoder over ``caches``; layers count from 1, ``steps`` are those of ``BatchCaches``.

    A position may be written any number of times, before which what stands there is not read, and several times in one
    pass by the same hidden.
    """

    def __init__(self, caches: BatchCaches) -> None:
        self.caches, self.spec = caches, caches.spec
        self._by_distance: Tensor | None = None
        if self.spec.bias_kind is BiasKind.relative_buckets:
            table = self.spec.tensors["bias"]  # (buckets, H)
            farthest = caches.keys.shape[3] - 1
            self._by_distance = table[self.spec.bias_row(farthest).to(table.device)].flip(0)  # (slots, H)

    def embed(
        self, tokens: Int[Tensor, "batch length"], steps: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length d_model"]:
        """What the first layer reads."""
        return embed(self.spec, tokens.flatten(), self._positions(steps).flatten()).view(*tokens.shape, -1)

    def run(
        self, layer: int, hidden: Float[Tensor, "batch length d_model"], steps: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length d_model"]:
        """One layer at these steps; writes its K and V there."""
        spec, flat = self.spec, hidden.flatten(0, 1)  # (B * T, d_model)
        normed = before_attention(spec, layer, flat)
        turn = turns(spec, self._positions(steps).flatten()) if spec.bias_kind is BiasKind.rotary else None
        self._write(layer, normed, steps, turn)
        seen = self._seen(steps)
        keys, values = (
            torch.where(seen.any(dim=1)[:, None, :, None], cache[layer - 1], 0.0)  # unwritten ones are NaN
            for cache in (self.caches.keys, self.caches.values)
        )
        flat = flat + self._attend(f"{layer}.self", normed, keys, values, self._bias(seen, steps), turn)
        if isinstance(self.caches, BatchLayers):
            normed = norm(spec, f"{layer}.cross_norm", flat)
            keys, values = self.caches.cross_keys[layer - 1], self.caches.cross_values[layer - 1]
            flat = flat + self._attend(f"{layer}.cross", normed, keys, values, self.caches.source_mask, None)
        return after_attention(spec, layer, flat).view(hidden.shape)

    def _write(
        self,
        layer: int,
        normed: Float[Tensor, "positions d_model"],
        steps: Int[Tensor, "batch length"],
        turn: tuple[Tensor, Tensor] | None,
    ) -> None:
        rows = torch.arange(len(steps), device=steps.device)[:, None]
        key, value = key_value(self.spec, layer, normed, turn)
        for cache, new in ((self.caches.keys, key), (self.caches.values, value)):
            cache[layer - 1][rows, :, steps + self.caches.before] = new.view(*steps.shape, *new.shape[1:])

    def _seen(self, steps: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch length slots"]:
        """Which slots each query attends to."""
        slots = torch.arange(self.caches.keys.shape[3], device=steps.device)
        seen: Tensor = slots <= (steps + self.caches.before)[..., None]
        if isinstance(self.caches, CausalLayers):
            seen = seen & (self.caches.mask[:, 0] == 0)  # slots between a shorter prompt and the answer
        return seen

    def _bias(
        self, seen: Bool[Tensor, "batch length slots"], steps: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch _ length slots"]:
        """What is added to the scores, for every head or for all alike."""
        lowest = torch.finfo(self.caches.keys.dtype).min
        if self._by_distance is None:
            zeros = torch.zeros(seen.shape, dtype=self.caches.keys.dtype, device=seen.device)
            return zeros.masked_fill(~seen, lowest)[:, None]
        distance = (steps[..., None] - torch.arange(seen.shape[2], device=steps.device)).clamp(min=0)
        return self._by_distance[distance].permute(0, 3, 1, 2).masked_fill(~seen[:, None], lowest)

    def _attend(
        self,
        name: str,
        normed: Float[Tensor, "positions d_model"],
        keys: Float[Tensor, "batch kv_heads keys d_kv"],
        values: Float[Tensor, "batch kv_heads keys d_kv"],
        bias: Float[Tensor, "batch _ _ keys"],
        turn: tuple[Tensor, Tensor] | None,
    ) -> Float[Tensor, "positions d_model"]:
        """Attention ``name`` (``3.self``, ``3.cross``) of each query over its row's keys."""
        query = queries(self.spec, name, normed, turn)  # (B * T, KV heads, group, d_kv)
        query = query.view(len(keys), -1, *query.shape[1:]).permute(0, 2, 3, 1, 4)
        scores = query @ keys[:, :, None].transpose(3, 4) * self.spec.attention_scale + bias[:, :, None]
        mixed = scores.softmax(dim=-1) @ values[:, :, None]  # (B, KV heads, group, T, d_kv)
        return linear(self.spec, f"{name}_o", mixed.permute(0, 3, 1, 2, 4).reshape(len(normed), -1))

    def _positions(self, steps: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        """Where the tokens stand in their sequences."""
        return steps + self.caches.lengths[:, None] - 1 if isinstance(self.caches, CausalLayers) else steps
