"""What runs layers. A runner is handed slots, positions and hidden states of a bucket; it knows no request and no rule.

``EagerRunner`` is plain torch over a DecoderSpec. Shapes are those of a bucket and of the slots, never of the rows in
it, and nothing here reads a value back to the host but ``told``. The native runner takes whole waves instead
(serve/native): what an engine needs of either is in serve/backend.py.
"""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.layer_math import after_attention, attend, before_attention, key_value, logits, norm
from calm.models.base import DecoderSpec

from .slots import Slots


@runtime_checkable
class Runner(Protocol):
    """The verbs of a decode step. Layers count from 1; B is a bucket."""

    spec: DecoderSpec
    slots: Any

    def embed(
        self, tokens: Int[Tensor, " batch"], slots: Int[Tensor, " batch"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch d_model"]: ...

    def layer(
        self,
        layer: int,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        prefix: bool,
    ) -> Float[Tensor, "batch d_model"]:
        """One layer; writes K and V at each row's position. ``prefix``: the slots are 0, 1, 2, ... B-1."""
        ...

    def backfill(
        self,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        written: Int[Tensor, " batch"],
        above: int,
    ) -> None:
        """K and V of the layers above ``written`` (per row) from ``hidden``; no row has less than ``above`` written."""
        ...

    def logits(self, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]: ...

    def told(self, flag: Bool[Tensor, ""]) -> bool: ...


class EagerRunner:
    """Plain eager torch: the engine's reference runner."""

    def __init__(self, spec: DecoderSpec, slots: Slots) -> None:
        self.spec, self.slots = spec, slots
        self._bias = self._bias_table(slots.max_target)

    def _bias_table(self, length: int) -> Float[Tensor, "query heads 1 keys"]:
        """Relative bias of every position, -inf on those that are still to come."""
        table = self.spec.tensors["bias"]  # (buckets, H)
        full = torch.full(
            (length, self.spec.num_heads, 1, length), float("-inf"), dtype=table.dtype, device=table.device
        )
        for step in range(length):
            full[step, :, 0, : step + 1] = table[self.spec.bias_row(step).to(table.device)].t()
        return full

    def embed(
        self, tokens: Int[Tensor, " batch"], slots: Int[Tensor, " batch"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch d_model"]:
        return F.embedding(tokens, self.spec.tensors["embed"])

    def layer(
        self,
        layer: int,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        prefix: bool,
    ) -> Float[Tensor, "batch d_model"]:
        normed = before_attention(self.spec, layer, hidden)
        self._put(layer, normed, slots, steps)
        keys = self._rows(self.slots.keys[layer - 1], slots, prefix)
        values = self._rows(self.slots.values[layer - 1], slots, prefix)
        hidden = hidden + attend(self.spec, f"{layer}.self", normed, keys, values, self._bias[steps])
        normed = norm(self.spec, f"{layer}.cross_norm", hidden)
        keys, values = self._cross(layer, slots, prefix)
        mask = self._rows(self.slots.source_bias, slots, prefix)
        hidden = hidden + attend(self.spec, f"{layer}.cross", normed, keys, values, mask)
        return after_attention(self.spec, layer, hidden)

    def backfill(
        self,
        hidden: Float[Tensor, "batch d_model"],
        slots: Int[Tensor, " batch"],
        steps: Int[Tensor, " batch"],
        written: Int[Tensor, " batch"],
        above: int,
    ) -> None:
        for layer in range(above + 1, self.spec.num_layers + 1):
            # a row that has this layer's K/V writes nowhere
            target = torch.where(written < layer, slots, self.slots.padding)
            self._put(layer, before_attention(self.spec, layer, hidden), target, steps)

    def logits(self, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
        return logits(self.spec, hidden)

    def told(self, flag: Bool[Tensor, ""]) -> bool:
        return bool(flag)

    def _cross(self, layer: int, slots: Tensor, prefix: bool) -> tuple[Tensor, Tensor]:
        """Cross K and V of these rows, each (B, H, S, d_kv)."""
        pools = self.slots.cross_keys, self.slots.cross_values
        keys, values = (self._rows(pool[layer - 1], slots, prefix) for pool in pools)
        return keys, values

    def _rows(self, pool: Tensor, slots: Tensor, prefix: bool) -> Tensor:
        return pool[: slots.shape[0]] if prefix else pool.index_select(0, slots)

    def _put(self, layer: int, normed: Tensor, slots: Tensor, steps: Tensor) -> None:
        key, value = key_value(self.spec, layer, normed)
        self.slots.keys[layer - 1][slots, :, steps] = key
        self.slots.values[layer - 1][slots, :, steps] = value
