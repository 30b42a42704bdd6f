"""Where a row's K and V live under the native runner: the same promises as serve.slots, in the layout of attention.h.

Rows need not be neighbours: every product reads rows through their slot numbers.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec

from ..slots import SlotError, SlotPool
from .build import Handle, library
from .views import BF16, FP32, INT8
from .weights import address

POISON = -1  # all bits set: NaN in fp32 and in bf16


class NativeSlots(SlotPool):
    """K/V of ``count`` rows.

    Attributes:
        keys, values, cross_keys, cross_values: lanes of 32 bits, (L, count + 1, H, lanes of a head).
        coarse: scales of int8 cross K/V, (L, count + 1, H, lanes); without lanes where there is none.
        source_length: (count + 1,) tokens of the source in each slot.
    """

    neighbours = False

    def __init__(
        self,
        spec: DecoderSpec,
        count: int,
        max_target: int,
        max_source: int,
        kind: int,
        poison: bool = False,
        int8_cross: bool = False,
    ) -> None:
        super().__init__(count, max_target, max_source, poison)
        self.cache_kind = FP32 if kind == FP32 else BF16
        self.cross_kind = INT8 if int8_cross else self.cache_kind
        self._width = spec.d_kv
        self._owner: Handle | None = None
        functions, rows = library(), (spec.num_layers, count + 1, spec.num_heads)

        def room(lanes: int) -> Tensor:
            return torch.zeros((*rows, lanes), dtype=torch.int32)

        self.keys = room(functions.calm_key_lanes(max_target, spec.d_kv, self.cache_kind))
        self.values = room(functions.calm_value_lanes(max_target, spec.d_kv, self.cache_kind))
        self.cross_keys = room(functions.calm_key_lanes(max_source, spec.d_kv, self.cross_kind))
        self.cross_values = room(functions.calm_value_lanes(max_source, spec.d_kv, self.cross_kind))
        self.coarse = room(functions.calm_coarse_lanes(max_source, spec.d_kv) if int8_cross else 0)
        self.source_length = torch.zeros(count + 1, dtype=torch.int32)
        self.source_length[count] = 1  # of the slot that is nobody's

    def attach(self, handle: Handle) -> None:
        """Whose memory this is."""
        self._owner = handle
        if self._poison:
            for slot in range(self.count):
                self._spoil(slot)

    def put_source(
        self,
        slot: int,
        keys: Float[Tensor, "layers heads source d_kv"],
        values: Float[Tensor, "layers heads source d_kv"],
    ) -> None:
        """Cross K/V of a source, without padding."""
        room = (self.keys.shape[0], self.keys.shape[2], keys.shape[2], self._width)
        if keys.shape != room or values.shape != room or not 1 <= keys.shape[2] <= self.max_source:
            raise SlotError(
                f"cross K/V of shape {tuple(keys.shape)} and {tuple(values.shape)} do not fit a slot of "
                f"{room[0]} layers, {room[1]} heads, 1 to {self.max_source} tokens and {room[3]} numbers"
            )
        keys, values = keys.float().contiguous(), values.float().contiguous()
        library().calm_put_source(self._handle(), slot, address(keys), address(values), keys.shape[2])

    def _clear(self, slot: int) -> None:
        self.source_length[slot] = 0  # whatever else is in it is not read before it is written

    def _spoil(self, slot: int) -> None:
        library().calm_fill(self._handle(), slot, POISON)

    def _handle(self) -> int:
        assert self._owner is not None
        return self._owner.address
