"""The border between decoders and architectures.

``DecoderAdapter`` is what the reference decoder asks of a model; ``DecoderSpec`` is what the engine
is handed instead of a model, so that it needs no transformers.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from .bias import relative_bucket_row, relative_buckets_both_ways


class DecoderAdapter(Protocol):
    """One decoder-layer at a time, one sequence (batch of 1). Layers count from 1."""

    num_layers: int
    eos_token_id: int
    start_token_id: int

    def prefill(self, source_ids: list[int]) -> Any:
        """Encode the source; returns the row's state (caches and everything a step needs)."""
        ...

    def embed(self, token: int, step: int) -> Float[Tensor, "1 1 d_model"]: ...

    def layer(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: Any, step: int
    ) -> Float[Tensor, "1 1 d_model"]:
        """Run layer ``index`` (1..L) at position ``step`` and write its K/V there."""
        ...

    def kv(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"]
    ) -> tuple[Float[Tensor, "1 heads 1 d_kv"], Float[Tensor, "1 heads 1 d_kv"]]:
        """K and V of layer ``index`` from ``hidden`` through that layer's own norm and projections."""
        ...

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """Shared final norm, then the shared head (scaled by d^-0.5 where the checkpoint is)."""
        ...


class BiasKind(str, Enum):
    """How a decoder knows positions."""

    relative_buckets = "relative_buckets"
    rotary = "rotary"
    learned = "learned"


@dataclass(frozen=True)
class DecoderSpec:
    """Tensors and flags of a decoder, exported once (design.md section 2).

    ``tensors`` uses the names ``embed``, ``head``, ``final_norm``, ``bias`` and, per layer i (1..L),
    ``{i}.self_norm``, ``{i}.self_{q,k,v,o}``, ``{i}.cross_norm``, ``{i}.cross_{q,k,v,o}``, ``{i}.ffn_norm``,
    ``{i}.ffn_{gate,up,down}`` (``gate`` absent when not gated). Matrices are (out, in) as in ``nn.Linear``.
    """

    num_layers: int
    num_heads: int
    d_model: int
    d_kv: int
    d_ff: int
    vocab_size: int
    norm_eps: float
    activation: str
    gated: bool
    bias_kind: BiasKind
    bias_buckets: int
    bias_max_distance: int
    cross_attention: bool
    attention_scale: float
    head_scale: float
    start_token_id: int
    eos_token_id: int
    pad_token_id: int
    tensors: dict[str, Tensor] = field(repr=False)

    def bias_row(self, step: int) -> Int[Tensor, " keys"]:
        """Bucket of every key position 0..step as seen from query position ``step`` (causal, T5)."""
        return relative_bucket_row(step, self.bias_buckets, self.bias_max_distance)


@dataclass(frozen=True)
class EncoderSpec:
    """Tensors and flags of a T5 encoder, exported once.

    ``tensors`` uses the names ``embed``, ``final_norm``, ``bias`` and, per layer i (1..L), those of ``DecoderSpec``
    without cross-attention. Widths of heads are the decoder's.
    """

    num_layers: int
    num_heads: int
    d_model: int
    d_kv: int
    d_ff: int
    norm_eps: float
    activation: str
    gated: bool
    bias_buckets: int
    bias_max_distance: int
    attention_scale: float
    tensors: dict[str, Tensor] = field(repr=False)

    def bias_row(self, length: int) -> Int[Tensor, " distances"]:
        """Bucket of key position minus query position, from ``1 - length`` to ``length - 1``."""
        return relative_buckets_both_ways(length, self.bias_buckets, self.bias_max_distance)
