"""Decoder arithmetic over a DecoderSpec, one query position a row: what every eager decoder computes alike.

Knows norms, rotation, attention scale, gated or plain feed-forward and what stands before the head; not where K and V
live.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .models.base import BiasKind, DecoderSpec, NormKind


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


def embed(
    spec: DecoderSpec, tokens: Int[Tensor, " rows"], positions: Int[Tensor, " rows"]
) -> Float[Tensor, "rows d_model"]:
    """What the first layer of a decoder-only model reads."""
    hidden = F.embedding(tokens, spec.tensors["embed"])
    if "embed_project" in spec.tensors:
        hidden = linear(spec, "embed_project", hidden)
    if spec.bias_kind is BiasKind.learned:
        hidden = hidden + F.embedding(positions + spec.position_offset, spec.tensors["positions"])
    return hidden


def before_attention(
    spec: DecoderSpec, layer: int, hidden: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows d_model"]:
    """What the self-attention of a layer reads, its keys and values too."""
    return norm(spec, f"{layer}.self_norm", hidden) if spec.pre_norm else hidden


def key_value(
    spec: DecoderSpec, layer: int, normed: Float[Tensor, "rows d_model"], turn: tuple[Tensor, Tensor] | None = None
) -> tuple[Float[Tensor, "rows kv_heads d_kv"], Float[Tensor, "rows kv_heads d_kv"]]:
    """K and V of the self-attention of a layer; ``turn`` as in ``attend``."""
    shape = (normed.shape[0], spec.num_kv_heads, spec.d_kv)
    key, value = (linear(spec, f"{layer}.self_{which}", normed).view(shape) for which in "kv")
    return (key if turn is None else rotate(key, *turn)), value


def after_attention(
    spec: DecoderSpec, layer: int, hidden: Float[Tensor, "rows d_model"]
) -> Float[Tensor, "rows d_model"]:
    """What is left of a layer once its attention has been added to the residual."""
    if spec.pre_norm:
        return hidden + feed_forward(spec, layer, norm(spec, f"{layer}.ffn_norm", hidden))
    hidden = norm(spec, f"{layer}.self_norm", hidden)
    return norm(spec, f"{layer}.ffn_norm", hidden + feed_forward(spec, layer, hidden))


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
    return linear(spec, f"{name}_o", mixed(spec, queries(spec, name, normed, turn), keys, values, bias))


def queries(
    spec: DecoderSpec, name: str, normed: Float[Tensor, "batch d_model"], turn: tuple[Tensor, Tensor] | None = None
) -> Float[Tensor, "batch kv_heads sharing d_kv"]:
    """Queries of the attention ``name``: neighbours share a head of K and V. ``turn`` as in ``attend``."""
    query = linear(spec, f"{name}_q", normed).view(normed.shape[0], spec.num_heads, spec.d_kv)
    if turn is not None:
        query = rotate(query, *turn)
    return query.view(normed.shape[0], spec.num_kv_heads, -1, spec.d_kv)


def mixed(
    spec: DecoderSpec,
    query: Float[Tensor, "batch kv_heads sharing d_kv"],
    keys: Float[Tensor, "batch kv_heads keys d_kv"],
    values: Float[Tensor, "batch kv_heads keys d_kv"],
    bias: Tensor,
) -> Float[Tensor, "batch inner"]:
    """Each head's mean of the values, weighted by its scores; ``bias`` as in ``attend``."""
    scores = query @ keys.transpose(2, 3) * spec.attention_scale + bias  # (B, KV heads, queries, keys)
    return (scores.softmax(dim=-1) @ values).reshape(query.shape[0], spec.num_heads * spec.d_kv)


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


def logits(spec: DecoderSpec, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
    """What the head says of the hidden states of any layer."""
    return F.linear(before_head(spec, hidden), spec.tensors["head"])
