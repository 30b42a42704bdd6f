"""The border between decoders and architectures.

``DecoderAdapter`` is what the reference decoder asks of a model; ``DecoderSpec`` is what the engine
is handed instead of a model, so that it needs no transformers.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from .bias import relative_bucket_row, relative_buckets_both_ways


@runtime_checkable  # argument checks in tests ask isinstance
class DecoderAdapter(Protocol):
    """One decoder-layer at a time, one sequence (batch of 1). Layers count from 1, steps from 0: token ``step`` of the
    answer is what step ``step`` says.

    ``state`` is what ``prefill`` gave; its ``holes[i]`` are the steps that left no K/V in layer i.
    """

    num_layers: int
    eos_token_id: int
    start_token_id: int

    def prefill(self, source_ids: list[int]) -> Any:
        """Encode the source at full depth; returns the row's state (caches and everything a step needs)."""
        ...

    def prompt_hidden(self, state: Any) -> Float[Tensor, "1 1 d_model"] | None:
        """The last layer's residual at a prompt's last position, which says the first token; None for encoder-decoders.

        A decoder-only model reads its whole prompt, the last token included, at full depth (SkipDecode, 2307.02628,
        section 2.3: every position below the prompt's size goes through all layers). So its first token comes from
        layer L under every policy, and step 0 has nothing to skip or to fill.
        """
        ...

    def embed(self, token: int, step: int, state: Any) -> Float[Tensor, "1 1 d_model"]: ...

    def layer(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: Any, step: int
    ) -> Float[Tensor, "1 1 d_model"]:
        """Run layer ``index`` (1..L) at the position of ``step`` and write its K/V there."""
        ...

    def kv(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: Any, step: int
    ) -> tuple[Float[Tensor, "1 kv_heads 1 d_kv"], Float[Tensor, "1 kv_heads 1 d_kv"]]:
        """K and V of layer ``index`` from ``hidden`` as ``layer`` would write them: own norm, projections, rotation."""
        ...

    def write_kv(self, index: int, state: Any, step: int, key: Tensor, value: Tensor) -> None:
        """Put K and V of layer ``index`` at ``step``: appended, or over what the layer itself wrote there."""
        ...

    def read_kv(self, index: int, state: Any, step: int) -> tuple[Tensor, Tensor]:
        """K and V of layer ``index`` at ``step``."""
        ...

    def forget(self, state: Any, step: int) -> None:
        """Drop the K and V of ``step`` and of all steps after it, in every layer."""
        ...

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """Shared final norm, then the shared head (scaled by d^-0.5 where the checkpoint is)."""
        ...


class BiasKind(str, Enum):
    """How a decoder knows positions."""

    relative_buckets = "relative_buckets"
    rotary = "rotary"
    learned = "learned"


class NormKind(str, Enum):
    """``rms``: no mean, no bias (T5, Llama). ``layer``: LayerNorm with bias (OPT)."""

    rms = "rms"
    layer = "layer"


@dataclass(frozen=True)
class DecoderSpec:
    """Tensors and flags of a decoder, exported once (design.md section 2).

    ``tensors`` uses the names ``embed``, ``head``, ``final_norm``, ``bias`` and, per layer i (1..L),
    ``{i}.self_norm``, ``{i}.self_{q,k,v,o}``, ``{i}.cross_norm``, ``{i}.cross_{q,k,v,o}``, ``{i}.ffn_norm``,
    ``{i}.ffn_{gate,up,down}`` (``gate`` absent when not gated). Matrices are (out, in) as in ``nn.Linear``. A matrix or
    norm that has a bias has it under its name and ``.bias``. Positions: ``bias`` (buckets, heads) holds relative ones,
    ``rotary`` (d_kv / 2,) the angles' frequencies, ``positions`` (positions, d_model) learned ones. ``head_project``
    (width of the head, d_model) stands before a head that is narrower than the residual; without ``final_norm`` the
    residual itself goes there.

    Args:
        num_kv_heads: heads of K and V; each serves ``num_heads / num_kv_heads`` neighbouring queries.
        pre_norm: norms stand before their sublayer; else after the sum with its residual (OPT-350m).
        rotary_scale: factor of rotated queries and keys.
        position_offset: row of ``positions`` that belongs to position 0.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
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
    norm_kind: NormKind = NormKind.rms
    pre_norm: bool = True
    rotary_scale: float = 1.0
    position_offset: int = 0

    @property
    def head_width(self) -> int:
        """What the head reads of a row: as a rule the whole residual."""
        narrower = self.tensors.get("head_project")
        return self.d_model if narrower is None else int(narrower.shape[0])

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
