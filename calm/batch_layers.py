"""Decoder layers of a padded batch with preallocated caches: eager torch over a DecoderSpec.

``BatchCaches`` knows where K and V live; ``BatchLayers`` is T5's decoder, with its relative bias, one table for every
layer. Neither knows of exits. The arithmetic is layer_math's.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .layer_math import after_attention, attend, before_attention, cross_projection, key_value, logits, norm
from .models.base import DecoderSpec


class BatchCaches(ABC):
    """The self-attention K and V of B rows, and what a batch of decoder layers must be able to do with them.

    Layers count from 1. Step s of every row lives in slot ``before + s``.

    Attributes:
        prompt_hidden: (B, d_model), what says the first tokens where the prompt does (``DecoderAdapter``), else None.
    """

    prompt_hidden: Tensor | None = None

    def __init__(self, spec: DecoderSpec, rows: int, slots: int, before: int, device: torch.device) -> None:
        self.spec, self.before = spec, before
        shape = (spec.num_layers, rows, spec.num_kv_heads, slots, spec.d_kv)
        dtype = spec.tensors["1.self_k"].dtype
        # NaN until written: a position that is read before it is written shows at once
        self.keys = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.values = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.holes: Tensor | None = None  # (L, B, slots) bool, only under backfill `mask`

    @abstractmethod
    def embed(self, tokens: Int[Tensor, " batch"], step: int) -> Float[Tensor, "batch d_model"]: ...

    @abstractmethod
    def run(self, layer: int, hidden: Float[Tensor, "batch d_model"], step: int) -> Float[Tensor, "batch d_model"]:
        """One layer at ``step``; writes its K and V there."""

    @abstractmethod
    def _key_value(self, layer: int, normed: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """K and V of ``layer``, (B, KV heads, d_kv) each, from its normed input."""

    def write(self, layer: int, hidden: Tensor, step: int, rows: Bool[Tensor, " batch"]) -> None:
        """Backfill: K and V of ``layer`` at ``step`` for the chosen rows, through its own norm and projections."""
        take, slot = rows[:, None, None], self.before + step
        normed = before_attention(self.spec, layer, hidden)
        for cache, new in zip((self.keys, self.values), self._key_value(layer, normed, step), strict=True):
            cache[layer - 1, :, :, slot] = torch.where(take, new, cache[layer - 1, :, :, slot])

    def copy_up(self, crossing: Int[Tensor, " batch"], step: int) -> None:
        """Raw K and V of each row's exit layer into all layers above it (CALM's ablation)."""
        rows, slot = torch.arange(crossing.shape[0], device=crossing.device), self.before + step
        for cache in (self.keys, self.values):
            exit_kv = cache[crossing - 1, rows, :, slot]  # (B, KV heads, d_kv)
            for layer in range(2, self.spec.num_layers + 1):
                above = (crossing < layer)[:, None, None]
                cache[layer - 1, :, :, slot] = torch.where(above, exit_kv, cache[layer - 1, :, :, slot])

    def punch(self, crossing: Int[Tensor, " batch"], step: int) -> None:
        """Leave holes above each row's exit: later positions do not attend there."""
        if self.holes is None:
            shape = (self.spec.num_layers, crossing.shape[0], self.keys.shape[3])
            self.holes = torch.zeros(shape, dtype=torch.bool, device=crossing.device)
        slot = self.before + step
        for layer in range(1, self.spec.num_layers + 1):
            above = crossing < layer
            self.holes[layer - 1, :, slot] = above
            self.keys[layer - 1, above, :, slot] = 0.0
            self.values[layer - 1, above, :, slot] = 0.0

    def select(self, index: Int[Tensor, " kept"]) -> None:
        """Keep only the rows of ``index``."""
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.holes = None if self.holes is None else self.holes[:, index]

    def logits(self, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
        return logits(self.spec, hidden)

    def _put(self, layer: int, normed: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Write K and V of ``layer`` from its normed input; returns all that the layer now attends to."""
        slot = self.before + step
        for cache, new in zip((self.keys, self.values), self._key_value(layer, normed, step), strict=True):
            cache[layer - 1, :, :, slot] = new
        return self.keys[layer - 1, :, :, : slot + 1], self.values[layer - 1, :, :, : slot + 1]

    def _without_holes(self, layer: int, bias: Float[Tensor, "_ _ 1 keys"], step: int) -> Tensor:
        if self.holes is None:
            return bias
        holes = self.holes[layer - 1, :, None, None, : self.before + step + 1]
        return bias.expand(holes.shape[0], -1, -1, -1).masked_fill(holes, torch.finfo(bias.dtype).min)


class BatchLayers(BatchCaches):
    """T5's decoder over B rows of at most ``max_steps`` positions."""

    def __init__(
        self,
        spec: DecoderSpec,
        encoder_hidden: Float[Tensor, "batch source d_model"],
        source_mask: Bool[Tensor, "batch source"],
        max_steps: int,
    ) -> None:
        super().__init__(spec, encoder_hidden.shape[0], max_steps, 0, encoder_hidden.device)
        lowest = torch.finfo(self.keys.dtype).min
        zeros = torch.zeros(source_mask.shape, dtype=self.keys.dtype, device=self.keys.device)
        self.source_mask = zeros.masked_fill(~source_mask, lowest)[:, None, None]  # (B, 1, 1, S)
        self.cross_keys, self.cross_values = (  # L x (B, H, S, d_kv)
            [
                cross_projection(spec, layer, which, encoder_hidden).contiguous()
                for layer in range(1, spec.num_layers + 1)
            ]
            for which in "kv"
        )
        self.biases: dict[int, Tensor] = {}

    def embed(self, tokens: Int[Tensor, " batch"], step: int) -> Float[Tensor, "batch d_model"]:
        return F.embedding(tokens, self.spec.tensors["embed"])

    def run(self, layer: int, hidden: Float[Tensor, "batch d_model"], step: int) -> Float[Tensor, "batch d_model"]:
        spec, normed = self.spec, before_attention(self.spec, layer, hidden)
        keys, values = self._put(layer, normed, step)
        bias = self._without_holes(layer, self._bias(step), step)
        hidden = hidden + attend(spec, f"{layer}.self", normed, keys, values, bias)
        normed = norm(spec, f"{layer}.cross_norm", hidden)
        cross_keys, cross_values = self.cross_keys[layer - 1], self.cross_values[layer - 1]
        hidden = hidden + attend(spec, f"{layer}.cross", normed, cross_keys, cross_values, self.source_mask)
        return after_attention(spec, layer, hidden)

    def select(self, index: Int[Tensor, " kept"]) -> None:
        super().select(index)
        self.source_mask = self.source_mask[index]
        self.cross_keys = [tensor[index] for tensor in self.cross_keys]
        self.cross_values = [tensor[index] for tensor in self.cross_values]

    def _key_value(self, layer: int, normed: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return key_value(self.spec, layer, normed)

    def _bias(self, step: int) -> Float[Tensor, "1 heads 1 keys"]:
        if step not in self.biases:
            table = self.spec.tensors["bias"]  # (buckets, H)
            row = table[self.spec.bias_row(step).to(table.device)]  # (keys, H)
            self.biases[step] = row.t()[None, :, None]
        return self.biases[step]
