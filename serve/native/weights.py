"""A decoder's weights as the step reads them: norms folded into what they precede, packed once.

RMSNorm's weight scales the inputs of the product that follows, so it is multiplied into that product's columns; the
rest of the norm is one number a row. A row's normalised state is then the same for all layers, and the K/V of every
skipped layer come from one left factor.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from calm.models.base import BiasKind, DecoderSpec

from ..screen import doubts, quantised
from .build import NativeError, library
from .views import BF16, FP32, INT8, LayerView, MatrixView

ACTIVATIONS = {"relu": 0, "gelu_new": 1, "silu": 2, "gelu": 3}
KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8}
LANES = 16
MAX_LAYERS = 63  # a wave says in one 64-bit word after which layers others wait


def check_served(spec: DecoderSpec) -> None:
    """Raise NativeError for a decoder that the compiled step does not know."""
    unknown = []
    if spec.bias_kind is not BiasKind.relative_buckets:
        unknown.append(f"positions by {spec.bias_kind.value}")
    if not spec.cross_attention:
        unknown.append("no cross-attention")
    if spec.activation not in ACTIVATIONS:
        unknown.append(f"activation {spec.activation!r}")
    if spec.num_layers > MAX_LAYERS:
        unknown.append(f"{spec.num_layers} layers")
    if spec.tensors["1.self_k"].dtype not in KINDS:
        unknown.append(f"dtype {spec.tensors['1.self_k'].dtype}")
    if spec.tensors["embed"].device.type != "cpu":
        unknown.append(f"device {spec.tensors['embed'].device}")
    if unknown:
        raise NativeError(f"the native runner has no decoder with {' and '.join(unknown)}; use runner=eager")


def address(tensor: Tensor) -> int:
    """Where a tensor's numbers are, for a library that reads them as they lie."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


@dataclass
class Packed:
    """Packed weights of one arithmetic; owns all memory that its views point to.

    Attributes:
        kind: FP32, BF16 or INT8.
        layers: (L) views.
        embed: (V, d_model), fp32 or bf16.
    """

    spec: DecoderSpec
    kind: int
    layers: "ctypes.Array[LayerView]"
    embed: Tensor
    _owned: list[Tensor]
    _heads: dict[int, MatrixView] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: DecoderSpec, kind: int) -> "Packed":
        """Raise NativeError where the compiled step cannot serve the decoder."""
        check_served(spec)
        owned: list[Tensor] = []
        layers = (LayerView * spec.num_layers)()
        for number, view in enumerate(layers, start=1):
            for name, weights in _layer(spec, number).items():
                setattr(view, name, packed_matrix(weights, kind, owned))
        return cls(spec, kind, layers, embedding(spec.tensors["embed"]), owned)

    def head(self, numbers: int) -> MatrixView:
        """The head packed as these numbers."""
        if numbers not in self._heads:
            self._heads[numbers] = packed_matrix(head_words(self.spec), numbers, self._owned)
        return self._heads[numbers]

    @property
    def word_numbers(self) -> int:
        """Of the head's rows as they lie: fp32 where the layers are, else bf16."""
        return FP32 if self.kind == FP32 else BF16

    @cached_property
    def words(self) -> Tensor:
        """The head's rows as they lie, in lanes of 32 bits: (V, lanes)."""
        words = head_words(self.spec)
        if self.word_numbers == BF16:
            words = F.pad(words.to(torch.bfloat16), (0, words.shape[1] % 2))
        return words.contiguous().view(torch.int32)

    @cached_property
    def screen(self) -> tuple[MatrixView, Tensor]:
        """An int8 head over the very numbers of ``words``, and how far off each of its logits can be: (2, V)."""
        words = head_words(self.spec)
        if self.word_numbers == BF16:
            words = words.to(torch.bfloat16).float()
        return packed_matrix(words, INT8, self._owned), doubts(words, quantised(words)).contiguous()


def embedding(table: Float[Tensor, "vocab d_model"]) -> Float[Tensor, "vocab d_model"]:
    """As a step reads it: bf16 stays, all else is fp32."""
    table = table.contiguous()
    return table if table.dtype is torch.bfloat16 else table.float()


def feed_forward(read: Callable[[str], Tensor], gated: bool) -> dict[str, Tensor]:
    """The two products of a layer's feed-forward, its norm folded in; gate first where there is one."""
    up = [read("ffn_gate"), read("ffn_up")] if gated else [read("ffn_up")]
    return {"up": torch.cat(up) * read("ffn_norm"), "down": read("ffn_down")}


def head_words(spec: DecoderSpec) -> Float[Tensor, "vocab d_model"]:
    """The head with the final norm's weight and the scale of tied checkpoints folded in."""
    return spec.tensors["head"].float() * (spec.tensors["final_norm"].float() * spec.head_scale)


def bias_by_distance(spec: DecoderSpec, positions: int) -> Float[Tensor, "heads keys"]:
    """Relative bias, the largest distance first; so that the keys of any position read neighbouring numbers."""
    table = spec.tensors["bias"].float()  # (buckets, H)
    row = table[spec.bias_row(positions - 1)].t()
    return torch.cat([row, torch.zeros(spec.num_heads, LANES)], dim=1).contiguous()


def _layer(spec: DecoderSpec, number: int) -> dict[str, Tensor]:
    def read(name: str) -> Tensor:
        return spec.tensors[f"{number}.{name}"].float()

    own, cross = read("self_norm"), read("cross_norm")
    return {
        "q": read("self_q") * own * spec.attention_scale,
        "kv": torch.cat([read("self_k"), read("self_v")]) * own,
        "o": read("self_o"),
        "cross_q": read("cross_q") * cross * spec.attention_scale,
        "cross_o": read("cross_o"),
        **feed_forward(read, spec.gated),
    }


def packed_matrix(weights: Float[Tensor, "outputs inputs"], kind: int, owned: list[Tensor]) -> MatrixView:
    """Weights as a product reads them, in memory that joins ``owned``."""
    weights = weights.float().contiguous()
    outputs, inputs = weights.shape
    lanes = library().calm_packed_lanes(outputs, inputs, kind)
    padded = -(-outputs // LANES) * LANES
    memory = _aligned(lanes)
    scale = torch.zeros(padded) if kind == INT8 else torch.zeros(0)
    correction = torch.zeros(padded if kind == INT8 else 0, dtype=torch.int32)
    library().calm_pack(address(weights), outputs, inputs, kind, address(memory), address(scale), address(correction))
    owned += [memory, scale, correction]
    return MatrixView(address(memory), address(scale), address(correction), outputs, inputs)


def _aligned(lanes: int) -> Tensor:
    """Lanes of 32 bits that begin at a multiple of 64 bytes, as a cache line does."""
    memory = torch.empty(lanes + LANES, dtype=torch.int32)
    skip = (-memory.data_ptr() // 4) % LANES
    return memory[skip : skip + lanes]
