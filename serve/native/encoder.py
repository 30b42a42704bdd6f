"""The compiled encoder: sources to cross-attention K/V, without padding, each by itself to the bit (see encoder.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec, EncoderSpec
from calm.rules import padded_length

from ..prefill import CrossKV
from .build import Handle, library
from .views import BF16, FP32, NO_MEMORY, POINTER, EncoderLayerView, EncoderView, MatrixView
from .weights import ACTIVATIONS, LANES, address, embedding, feed_forward, packed_matrix


@dataclass
class PackedEncoder:
    """Packed weights of one arithmetic; owns all memory that its views point to.

    Attributes:
        kind: FP32, BF16 or INT8.
        cross: (decoder layers) keys and values from the encoder's output.
        embed: (V, d_model), fp32 or bf16.
        dtype: of the cross K/V: the model's own.
    """

    spec: EncoderSpec
    kind: int
    layers: "ctypes.Array[EncoderLayerView]"
    cross: "ctypes.Array[MatrixView]"
    embed: Tensor
    dtype: torch.dtype
    _owned: list[Tensor]

    @classmethod
    def of(cls, spec: EncoderSpec, decoder: DecoderSpec, kind: int) -> "PackedEncoder":
        owned: list[Tensor] = []
        layers = (EncoderLayerView * spec.num_layers)()
        for number, view in enumerate(layers, start=1):
            for name, weights in _layer(spec, number).items():
                setattr(view, name, packed_matrix(weights, kind, owned))
        norm = spec.tensors["final_norm"].float()
        cross = (MatrixView * decoder.num_layers)()
        for number in range(1, decoder.num_layers + 1):
            both = [decoder.tensors[f"{number}.cross_{name}"].float() for name in "kv"]
            cross[number - 1] = packed_matrix(torch.cat(both) * norm, kind, owned)
        embed = embedding(spec.tensors["embed"])
        return cls(spec, kind, layers, cross, embed, decoder.tensors["1.cross_k"].dtype, owned)


def _layer(spec: EncoderSpec, number: int) -> dict[str, Tensor]:
    def read(name: str) -> Tensor:
        return spec.tensors[f"{number}.{name}"].float()

    own = read("self_norm")
    return {
        "qkv": torch.cat([read("self_q") * spec.attention_scale, read("self_k"), read("self_v")]) * own,
        "o": read("self_o"),
        **feed_forward(read, spec.gated),
    }


def bias_both_ways(spec: EncoderSpec, longest: int) -> Float[Tensor, "heads distances"]:
    """Relative bias by key position minus query position, from ``1 - longest``; padded so that vectors may be read."""
    table = spec.tensors["bias"].float()  # (buckets, H)
    return F.pad(table[spec.bias_row(longest)].t(), (0, LANES)).contiguous()


class NativePrefill:
    """Encodes sources as they are: no padding, so no rows or lengths that a call would have to have.

    Attributes:
        rows: sources of one call at most, so that decoding rows wait for no more than these.
    """

    padded_calls = False

    def __init__(self, packed: PackedEncoder, rows: int, multiple: int, max_source: int) -> None:
        spec = packed.spec
        self.rows, self._multiple, self._max_source = rows, multiple, max_source
        self._layers, self._heads, self._width = len(packed.cross), spec.num_heads, spec.d_kv
        self._dtype = packed.dtype
        bias = bias_both_ways(spec, max_source)
        view = EncoderView(
            layers=spec.num_layers,
            heads=spec.num_heads,
            d_model=spec.d_model,
            d_kv=spec.d_kv,
            d_ff=spec.d_ff,
            kind=packed.kind,
            cache_kind=FP32 if packed.kind == FP32 else BF16,
            activation=ACTIVATIONS[spec.activation],
            gated=spec.gated,
            sources=max_source,
            embed_kind=BF16 if packed.embed.dtype is torch.bfloat16 else FP32,
            cross_layers=self._layers,
            eps=spec.norm_eps,
            layer=ctypes.addressof(packed.layers),
            embed=address(packed.embed),
            bias=address(bias),
            cross=ctypes.addressof(packed.cross),
        )
        self._encode = library().calm_encode
        self._owner = Handle("encoder", view, packed, bias)

    def padded(self, length: int) -> int:
        """Tokens by which a cost table knows the encoding of such a source."""
        return padded_length(length, self._multiple, self._max_source)

    def alike(self, length: int) -> int:
        """Sources of any lengths may be encoded together."""
        return 0

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[CrossKV]:
        """Cross K/V of sources of 1 to ``max_source`` tokens. Raises MemoryError."""
        lengths = [len(source) for source in sources]
        assert 1 <= min(lengths) and max(lengths) <= self._max_source
        tokens = [token for source in sources for token in source]
        room = [(self._layers, self._heads, length, self._width) for length in lengths]
        found = [(torch.empty(shape), torch.empty(shape)) for shape in room]
        addresses = [(POINTER * len(found))(*(address(kv[part]) for kv in found)) for part in range(2)]
        status = self._encode(
            self._owner.address,
            (ctypes.c_int32 * len(tokens))(*tokens),
            (ctypes.c_int32 * len(lengths))(*lengths),
            len(lengths),
            *addresses,
        )
        if status == NO_MEMORY:
            raise MemoryError("no memory left to encode these sources")
        return [(keys.to(self._dtype), values.to(self._dtype)) for keys, values in found]
