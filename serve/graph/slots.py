"""Where a row's K and V live under the graph runner, and what the next step of each slot begins with."""

import torch
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec

from ..slots import Slots
from .coarse import in_steps


class GraphSlots(Slots):
    """K/V of ``count`` rows; the last slot is nobody's.

    Attributes:
        source_length: (count + 1,) tokens of the source in each slot.
        position, token: (count + 1,) what the next step of a slot decodes, as the step before left it on the device.
        int8_cross: cross K/V are whole numbers of steps.
        key_steps: (L, count + 1, H, S) of each position's key; fp32, without positions where cross K/V are numbers.
        value_steps: (L, count + 1, H, d_kv) of each number of the values; likewise.
    """

    neighbours = False  # kernels read rows through their slot numbers

    def __init__(
        self,
        spec: DecoderSpec,
        count: int,
        max_target: int,
        max_source: int,
        device: torch.device,
        poison: bool = False,
        int8_cross: bool = False,
    ) -> None:
        self.int8_cross = int8_cross
        self.source_length = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.position, self.token = (torch.zeros(count + 1, dtype=torch.long, device=device) for _ in range(2))
        steps = (spec.num_layers, count + 1, spec.num_heads)
        self.key_steps, self.value_steps = (
            torch.zeros((*steps, width * int8_cross), device=device) for width in (max_source, spec.d_kv)
        )
        super().__init__(
            spec, count, max_target, max_source, device, poison, cross_dtype=torch.int8 if int8_cross else None
        )

    def put_source(
        self,
        slot: int,
        keys: Float[Tensor, "layers heads source d_kv"],
        values: Float[Tensor, "layers heads source d_kv"],
    ) -> None:
        length = keys.shape[2]
        if self.int8_cross:
            keys, key_steps = in_steps(keys, 3)
            values, value_steps = in_steps(values, 2)
            self.key_steps[:, slot, :, :length] = key_steps.squeeze(3)
            self.value_steps[:, slot] = value_steps.squeeze(2)
        super().put_source(slot, keys, values)
        self.source_length[slot] = length

    def _clear(self, slot: int) -> None:
        super()._clear(slot)
        self.source_length[slot] = 0
        self._fill_steps(slot, 0.0)

    def _spoil(self, slot: int) -> None:
        super()._spoil(slot)
        self._fill_steps(slot, float("nan"))

    def _fill_steps(self, slot: int, value: float) -> None:
        for steps in (self.key_steps, self.value_steps):
            steps[:, slot] = value
