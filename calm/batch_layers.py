"""Decoder layers of a padded batch with preallocated caches: eager torch over a DecoderSpec.

Knows where K and V live and the relative bias, one table for every layer; knows nothing of exits. The arithmetic is
layer_math's.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .layer_math import attend, before_head, cross_projection, feed_forward, rms_norm
from .models.base import DecoderSpec


class BatchLayers:
    """The decoder over B rows of at most ``max_steps`` positions. Layers count from 1."""

    def __init__(
        self,
        spec: DecoderSpec,
        encoder_hidden: Float[Tensor, "batch source d_model"],
        source_mask: Bool[Tensor, "batch source"],
        max_steps: int,
    ) -> None:
        self.spec = spec
        batch = encoder_hidden.shape[0]
        shape = (spec.num_layers, batch, spec.num_heads, max_steps, spec.d_kv)
        dtype, device = spec.tensors["1.self_k"].dtype, encoder_hidden.device
        # NaN until written: a position that is read before it is written shows at once
        self.keys = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.values = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.holes: Tensor | None = None  # (L, B, max_steps) bool, only under backfill `mask`
        lowest = torch.finfo(dtype).min
        zeros = torch.zeros(source_mask.shape, dtype=dtype, device=device)
        self.source_mask = zeros.masked_fill(~source_mask, lowest)[:, None, None]  # (B, 1, 1, S)
        self.cross_keys, self.cross_values = (  # L x (B, H, S, d_kv)
            [
                cross_projection(spec, layer, which, encoder_hidden).contiguous()
                for layer in range(1, spec.num_layers + 1)
            ]
            for which in "kv"
        )
        self.biases: dict[int, Tensor] = {}

    def embed(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch d_model"]:
        return F.embedding(tokens, self.spec.tensors["embed"])

    def run(self, layer: int, hidden: Float[Tensor, "batch d_model"], step: int) -> Float[Tensor, "batch d_model"]:
        """One layer at position ``step``; writes its K and V there."""
        tensors, spec = self.spec.tensors, self.spec
        normed = rms_norm(hidden, tensors[f"{layer}.self_norm"], spec.norm_eps)
        self._put(layer, normed, step)
        keys, values = self.keys[layer - 1, :, :, : step + 1], self.values[layer - 1, :, :, : step + 1]
        bias = self._bias(step)
        if self.holes is not None:
            holes = self.holes[layer - 1, :, None, None, : step + 1]
            bias = bias.expand(hidden.shape[0], -1, -1, -1).masked_fill(holes, torch.finfo(bias.dtype).min)
        hidden = hidden + attend(spec, f"{layer}.self", normed, keys, values, bias)
        normed = rms_norm(hidden, tensors[f"{layer}.cross_norm"], spec.norm_eps)
        cross_keys, cross_values = self.cross_keys[layer - 1], self.cross_values[layer - 1]
        hidden = hidden + attend(spec, f"{layer}.cross", normed, cross_keys, cross_values, self.source_mask)
        normed = rms_norm(hidden, tensors[f"{layer}.ffn_norm"], spec.norm_eps)
        return hidden + feed_forward(spec, layer, normed)

    def write(self, layer: int, hidden: Tensor, step: int, rows: Bool[Tensor, " batch"]) -> None:
        """Backfill: K and V of ``layer`` at ``step`` for the chosen rows, through its own norm and projections."""
        normed = rms_norm(hidden, self.spec.tensors[f"{layer}.self_norm"], self.spec.norm_eps)
        old_keys, old_values = self.keys[layer - 1, :, :, step].clone(), self.values[layer - 1, :, :, step].clone()
        self._put(layer, normed, step)
        stay = ~rows[:, None, None]
        self.keys[layer - 1, :, :, step] = torch.where(stay, old_keys, self.keys[layer - 1, :, :, step])
        self.values[layer - 1, :, :, step] = torch.where(stay, old_values, self.values[layer - 1, :, :, step])

    def copy_up(self, crossing: Int[Tensor, " batch"], step: int) -> None:
        """Raw K and V of each row's exit layer into all layers above it (CALM's ablation)."""
        rows = torch.arange(crossing.shape[0], device=crossing.device)
        for cache in (self.keys, self.values):
            exit_kv = cache[crossing - 1, rows, :, step]  # (B, H, d_kv)
            for layer in range(2, self.spec.num_layers + 1):
                above = (crossing < layer)[:, None, None]
                cache[layer - 1, :, :, step] = torch.where(above, exit_kv, cache[layer - 1, :, :, step])

    def punch(self, crossing: Int[Tensor, " batch"], step: int) -> None:
        """Leave holes above each row's exit: later positions do not attend there."""
        if self.holes is None:
            shape = (self.spec.num_layers, crossing.shape[0], self.keys.shape[3])
            self.holes = torch.zeros(shape, dtype=torch.bool, device=crossing.device)
        for layer in range(1, self.spec.num_layers + 1):
            above = crossing < layer
            self.holes[layer - 1, :, step] = above
            self.keys[layer - 1, above, :, step] = 0.0
            self.values[layer - 1, above, :, step] = 0.0

    def select(self, index: Int[Tensor, " kept"]) -> None:
        """Keep only the rows of ``index``."""
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.holes = None if self.holes is None else self.holes[:, index]
        self.source_mask = self.source_mask[index]
        self.cross_keys = [tensor[index] for tensor in self.cross_keys]
        self.cross_values = [tensor[index] for tensor in self.cross_values]

    def logits(self, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
        return F.linear(before_head(self.spec, hidden), self.spec.tensors["head"])

    def _put(self, layer: int, normed: Tensor, step: int) -> None:
        shape = (normed.shape[0], self.spec.num_heads, self.spec.d_kv)
        tensors = self.spec.tensors
        self.keys[layer - 1, :, :, step] = F.linear(normed, tensors[f"{layer}.self_k"]).view(shape)
        self.values[layer - 1, :, :, step] = F.linear(normed, tensors[f"{layer}.self_v"]).view(shape)

    def _bias(self, step: int) -> Float[Tensor, "1 heads 1 keys"]:
        if step not in self.biases:
            table = self.spec.tensors["bias"]  # (buckets, H)
            row = table[self.spec.bias_row(step).to(table.device)]  # (keys, H)
            self.biases[step] = row.t()[None, :, None]
        return self.biases[step]
