"""T5's decoder arithmetic over a DecoderSpec, one query position a row: what every eager decoder computes alike.

Knows RMSNorm, attention scale, gated or plain feed-forward and the head's scale; not where K and V live.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .models.base import DecoderSpec


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
    keys: Float[Tensor, "batch heads keys d_kv"],
    values: Float[Tensor, "batch heads keys d_kv"],
    bias: Tensor,
) -> Float[Tensor, "batch d_model"]:
    """Attention ``name`` (``3.self``, ``3.cross``) of each row over its keys; ``bias``: as (B, H, 1, keys)."""
    batch, heads, d_kv = normed.shape[0], spec.num_heads, spec.d_kv
    query = F.linear(normed, spec.tensors[f"{name}_q"]).view(batch, heads, 1, d_kv)
    scores = query @ keys.transpose(2, 3) * spec.attention_scale + bias  # (B, H, 1, keys)
    mixed = (scores.softmax(dim=-1) @ values).reshape(batch, heads * d_kv)
    return F.linear(mixed, spec.tensors[f"{name}_o"])


def feed_forward(
    spec: DecoderSpec, layer: int, normed: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch d_model"]:
    """The layer's feed-forward part; its last product is in the dtype of its weights, which may stay fp32."""
    up, down = F.linear(normed, spec.tensors[f"{layer}.ffn_up"]), spec.tensors[f"{layer}.ffn_down"]
    if spec.gated:
        inner = activation(spec.activation, F.linear(normed, spec.tensors[f"{layer}.ffn_gate"])) * up
    else:
        inner = activation(spec.activation, up)
    return F.linear(inner.to(down.dtype), down).to(normed.dtype)


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


def before_head(spec: DecoderSpec, hidden: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch d_model"]:
    """What the head's matrix multiplies: normed, and scaled where the checkpoint is tied."""
    normed = rms_norm(hidden, spec.tensors["final_norm"], spec.norm_eps)
    return normed if spec.head_scale == 1.0 else normed * spec.head_scale
