"""The layers of a decoder-only model over a batch of prompts of different lengths: eager torch over a DecoderSpec.

A prompt of P tokens fills the first P of the S slots that the longest one needs; the slots after it up to S stay unseen
for its row. Step s lives in slot S - 1 + s of every row and at position P - 1 + s of its own: rotary and learned
positions count from each prompt's beginning, and a row computes what it would alone.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .batch_layers import BatchCaches
from .layer_math import after_attention, attend, before_attention, embed, key_value, turns
from .models.base import BiasKind, DecoderSpec


class CausalLayers(BatchCaches):
    """Decoder layers over B prompts that have been read. Step 0 is the prompts' own: it is never run."""

    def __init__(
        self,
        spec: DecoderSpec,
        keys: Float[Tensor, "layers batch kv_heads prompt d_kv"],
        values: Float[Tensor, "layers batch kv_heads prompt d_kv"],
        prompt_hidden: Float[Tensor, "batch d_model"],
        prompt_mask: Bool[Tensor, "batch prompt"],
        max_steps: int,
    ) -> None:
        rows, prompt = prompt_mask.shape
        super().__init__(spec, rows, prompt + max_steps - 1, prompt - 1, prompt_mask.device)
        self.keys[:, :, :, :prompt], self.values[:, :, :, :prompt] = keys, values
        self.prompt_hidden = prompt_hidden
        self.lengths = prompt_mask.sum(dim=1)  # (B,)
        steps = torch.ones((rows, max_steps - 1), dtype=torch.bool, device=prompt_mask.device)
        seen = torch.cat([prompt_mask, steps], dim=1)
        zeros = torch.zeros(seen.shape, dtype=self.keys.dtype, device=seen.device)
        self.mask = zeros.masked_fill(~seen, torch.finfo(zeros.dtype).min)[:, None, None]  # (B, 1, 1, slots)
        self._turned: tuple[int, tuple[Tensor, Tensor]] | None = None

    def embed(self, tokens: Int[Tensor, " batch"], step: int) -> Float[Tensor, "batch d_model"]:
        return embed(self.spec, tokens, self._positions(step))

    def run(self, layer: int, hidden: Float[Tensor, "batch d_model"], step: int) -> Float[Tensor, "batch d_model"]:
        normed = before_attention(self.spec, layer, hidden)
        keys, values = self._put(layer, normed, step)
        bias = self._without_holes(layer, self.mask[..., : keys.shape[2]], step)
        hidden = hidden + attend(self.spec, f"{layer}.self", normed, keys, values, bias, self._turn(step))
        return after_attention(self.spec, layer, hidden)

    def select(self, index: Int[Tensor, " kept"]) -> None:
        super().select(index)
        self.lengths, self.mask, self._turned = self.lengths[index], self.mask[index], None

    def _key_value(self, layer: int, normed: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return key_value(self.spec, layer, normed, self._turn(step))

    def _positions(self, step: int) -> Int[Tensor, " batch"]:
        return self.lengths - 1 + step

    def _turn(self, step: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the rows' positions at ``step``; None where positions are not rotary."""
        if self.spec.bias_kind is not BiasKind.rotary:
            return None
        if self._turned is None or self._turned[0] != step:
            self._turned = step, turns(self.spec, self._positions(step))
        return self._turned[1]
