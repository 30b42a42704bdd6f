"""Decoder arithmetic over a DecoderSpec, one query position a row: what every eager decoder computes alike.

Knows norms, rotation, attention scale, gated or plain feed-forward and what stands before the head; not where K and V
live.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .models.base import DecoderSpec, NormKind


def linear(spec: DecoderSpec, name: str, inputs: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Product with the matrix ``name``, and its bias where it has one."""
    return F.linear(inputs, spec.tensors[name], spec.tensors.get(f"{name}.bias"))


def norm(spec: DecoderSpec, name: str, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
    """The norm ``name`` of the kind that the decoder has."""
    weight = spec.tensors[name]
    if spec.norm_kind is NormKind.rms:
        return rms_norm(hidden, weight, spec.norm_eps)
    return F.layer_norm(hidden, weight.shape, weight, spec.tensors[f"{name}.bias"], spec.norm_eps)


def rotate(
    values: Float[Tensor, "rows heads d_kv"], cosine: Float[Tensor, "rows 1 d_kv"], sine: Float[Tensor, "rows 1 d_kv"]
) -> Float[Tensor, "rows heads d_kv"]:
    """Rotary positions (RoFormer, 2104.09864): a dimension turns with the one half a head on, as in Hugging Face."""
    first, second = values.chunk(2, dim=-1)
    return values * cosine + torch.cat([-second, first], dim=-1) * sine


def turns(
    spec: DecoderSpec, positions: Int[Tensor, " rows"]
) -> tuple[Float[Tensor, "rows 1 d_kv"], Float[Tensor, "rows 1 d_kv"]]:
    """Cosines and sines by which queries and keys at ``positions`` are rotated, the same for every head."""
    angles = positions.float()[:, None] * spec.tensors["rotary"].float()
    angles = torch.cat([angles, angles], dim=-1)[:, None]  # (rows, 1, d_kv)
    dtype = spec.tensors["1.self_k"].dtype
    return (angles.cos() * spec.rotary_scale).to(dtype), (angles.sin() * spec.rotary_scale).to(dtype)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """T5's norm: no mean, no bias, statistics in fp32."""
    variance = hidden.float().pow(2).mean(-1, keepdim=True)
    return weight * (hidden * torch.rsqrt(variance + eps)).to(weight.dtype)


def activation(name: str, values: Tensor) -> Tensor:
    """T5's feed-forward activations: ``relu`` (v1.0), ``gelu_new`` (v1.1)."""
    if name == "relu":
        return F.relu(values)
    if name == "gelu_new":
        return F.gelu(values, approximate="tanh")
    if name == "silu":
        return F.silu(values)
    if name == "gelu":
        return F.gelu(values)
    raise ValueError(f"unknown activation {name!r}; choose from relu, gelu_new, gelu, silu")


def attend(
    spec: DecoderSpec,
    name: str,
    normed: Float[Tensor, "batch d_model"],
    keys: Float[Tensor, "batch kv_heads keys d_kv"],
    values: Float[Tensor, "batch kv_heads keys d_kv"],
    bias: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, "batch d_model"]:
    """Attention ``name`` (``3.self``, ``3.cross``) of each row over its keys.

    Args:
        bias: as (B, KV heads, 1, keys).
        turn: cosines and sines of the rows' positions, where positions are rotary; keys are rotated already.
    """
    batch, heads, d_kv = normed.shape[0], spec.num_heads, spec.d_kv
    query = linear(spec, f"{name}_q", normed).view(batch, heads, d_kv)
    if turn is not None:
        query = rotate(query, *turn)
    query = query.view(batch, spec.num_kv_heads, -1, d_kv)  # neighbours share a head of K and V
    scores = query @ keys.transpose(2, 3) * spec.attention_scale + bias  # (B, KV heads, queries, keys)
    mixed = (scores.softmax(dim=-1) @ values).reshape(batch, heads * d_kv)
    return linear(spec, f"{name}_o", mixed)


def feed_forward(
    spec: DecoderSpec, layer: int, normed: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch d_model"]:
    """The layer's feed-forward part; its last product is in the dtype of its weights, which may stay fp32."""
    up, down = linear(spec, f"{layer}.ffn_up", normed), spec.tensors[f"{layer}.ffn_down"]
    if spec.gated:
        inner = activation(spec.activation, linear(spec, f"{layer}.ffn_gate", normed)) * up
    else:
        inner = activation(spec.activation, up)
    return linear(spec, f"{layer}.ffn_down", inner.to(down.dtype)).to(normed.dtype)


def cross_projection(
    spec: DecoderSpec, layer: int, which: str, encoder_hidden: Float[Tensor, "batch source d_model"]
) -> Float[Tensor, "batch heads source d_kv"]:
    """Cross-attention keys (``which`` = k) or values (v) of a layer."""
    shape = (*encoder_hidden.shape[:2], spec.num_heads, spec.d_kv)
    return F.linear(encoder_hidden, spec.tensors[f"{layer}.cross_{which}"]).view(shape).transpose(1, 2)


def cross_kv(
    spec: DecoderSpec, encoder_hidden: Float[Tensor, "rows source d_model"]
) -> tuple[Float[Tensor, "layers rows heads source d_kv"], Float[Tensor, "layers rows heads source d_kv"]]:
    """K and V of the cross-attention of every layer."""
    layers = range(1, spec.num_layers + 1)
    keys, values = (
        torch.stack([cross_projection(spec, layer, which, encoder_hidden) for layer in layers]) for which in "kv"
    )
    return keys, values


def before_head(spec: DecoderSpec, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch width"]:
    """What the head's matrix multiplies: normed, narrowed where the head is, scaled where a T5 checkpoint is tied."""
    normed = norm(spec, "final_norm", hidden) if "final_norm" in spec.tensors else hidden
    if "head_project" in spec.tensors:
        normed = linear(spec, "head_project", normed)
    return normed if spec.head_scale == 1.0 else normed * spec.head_scale
