"""Weights as the kernels read them: what is read together lies together."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calm.models.base import DecoderSpec


@dataclass(frozen=True)
class Packed:
    """Copies of a decoder's weights that are multiplied with normed rows, each with its norm's gain.

    Attributes:
        qkv: of all layers, queries over keys over values of self-attention.
        cross_q: of each layer.
        inner: of each layer's feed-forward: ``up``, or a row of ``gate`` and a row of ``up`` in turn.
        head: of the words.
        bias: relative bias by head and distance (query position minus key position), fp32.
    """

    qkv: Float[Tensor, "layers three_heads_d_kv d_model"]
    cross_q: list[Float[Tensor, "heads_d_kv d_model"]]
    inner: list[Float[Tensor, "ups_and_gates d_model"]]
    head: Float[Tensor, "vocab d_model"]
    bias: Float[Tensor, "heads distances"]

    @classmethod
    def of(cls, spec: DecoderSpec, positions: int) -> "Packed":
        tensors, layers = spec.tensors, range(1, spec.num_layers + 1)

        def normed(norm: str, name: str) -> list[Tensor]:
            return [gained(tensors[f"{layer}.{name}"], tensors[f"{layer}.{norm}_norm"]) for layer in layers]

        table = tensors["bias"].float()  # (buckets, heads)
        buckets = spec.bias_row(positions - 1).to(table.device)  # of keys 0, 1, ... seen from the last position
        queries, keys, values = (torch.stack(normed("self", f"self_{name}")) for name in "qkv")
        inner = normed("ffn", "ffn_up")
        if spec.gated:
            gates = normed("ffn", "ffn_gate")
            inner = [torch.stack(pair, dim=1).flatten(0, 1) for pair in zip(gates, inner, strict=True)]
        return cls(
            qkv=torch.cat([queries, keys, values], dim=1),
            cross_q=normed("cross", "cross_q"),
            inner=inner,
            head=gained(tensors["head"], tensors["final_norm"]),
            bias=table[buckets].flip(0).t().contiguous(),
        )


def gained(
    weight: Float[Tensor, "outputs d_model"], gain: Float[Tensor, " d_model"]
) -> Float[Tensor, "outputs d_model"]:
    """What takes rows without their norm's gain to what ``weight`` makes of them with it; rounded once."""
    return (weight.float() * gain.float()).to(weight.dtype)
