"""Weights as the kernels read them: what is read together lies together."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec


@dataclass(frozen=True)
class Packed:
    """Copies of a decoder's weights.

    Attributes:
        qkv: of each layer, queries over keys over values.
        kv: keys over values of all layers, for backfill.
        norms: of all layers, before self-attention.
        bias: relative bias by head and distance (query position minus key position), fp32.
    """

    qkv: list[Float[Tensor, "three_heads_d_kv d_model"]]
    kv: Float[Tensor, "layers two_heads_d_kv d_model"]
    norms: Float[Tensor, "layers d_model"]
    bias: Float[Tensor, "heads distances"]

    @classmethod
    def of(cls, spec: DecoderSpec, positions: int) -> "Packed":
        def each(layer: int, names: str) -> Tensor:
            return torch.cat([spec.tensors[f"{layer}.self_{name}"] for name in names])

        layers = range(1, spec.num_layers + 1)
        table = spec.tensors["bias"].float()  # (buckets, heads)
        buckets = spec.bias_row(positions - 1).to(table.device)  # of keys 0, 1, ... seen from the last position
        return cls(
            qkv=[each(layer, "qkv") for layer in layers],
            kv=torch.stack([each(layer, "kv") for layer in layers]),
            norms=torch.stack([spec.tensors[f"{layer}.self_norm"] for layer in layers]),
            bias=table[buckets].flip(0).t().contiguous(),
        )
