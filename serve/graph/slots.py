"""Where a row's K and V live under the graph runner, and what the next step of each slot begins with."""

import torch
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec

from ..slots import Slots


class GraphSlots(Slots):
    """K/V of ``count`` rows; the last slot is nobody's.

    Attributes:
        source_length: (count + 1,) tokens of the source in each slot.
        position, token: (count + 1,) what the next step of a slot decodes, as the step before left it on the device.
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
    ) -> None:
        self.source_length = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.position, self.token = (torch.zeros(count + 1, dtype=torch.long, device=device) for _ in range(2))
        super().__init__(spec, count, max_target, max_source, device, poison)

    def put_source(
        self,
        slot: int,
        keys: Float[Tensor, "layers heads source d_kv"],
        values: Float[Tensor, "layers heads source d_kv"],
    ) -> None:
        super().put_source(slot, keys, values)
        self.source_length[slot] = keys.shape[2]

    def _clear(self, slot: int) -> None:
        super()._clear(slot)
        self.source_length[slot] = 0
