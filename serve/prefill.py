"""From source ids to cross-attention K/V: the encoder once per source, or not at all when it was seen before."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.last_used import LastUsed
from calm.models.base import DecoderSpec
from calm.rules import padded_length

Encode = Callable[[Int[Tensor, "rows source"], Bool[Tensor, "rows source"]], Float[Tensor, "rows source d_model"]]
Read = Callable[[Int[Tensor, "rows source"], Bool[Tensor, "rows source"]], tuple[Tensor, Tensor, Tensor]]
CrossKV = tuple[Any, ...]  # keys and values, (layers, heads, source, d_kv) each, and what else of it a slot is given
Cross = Callable[[Float[Tensor, "rows source d_model"]], tuple[Tensor, Tensor]]  # (layers, rows, heads, source, d_kv)


def source_key(source: Sequence[int]) -> bytes:
    """Name of a source: a hash of its ids."""
    return hashlib.blake2b(b",".join(str(token).encode() for token in source), digest_size=16).digest()


class CrossCache:
    """Cross K/V of the sources used last: at most ``rows`` of them, of at most ``max_bytes`` together (None: any)."""

    def __init__(self, rows: int, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._kept: LastUsed[CrossKV] = LastUsed(rows, max_bytes)
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    @property
    def held_bytes(self) -> int:
        """Bytes of what is kept."""
        return self._kept.size

    def get(self, key: bytes) -> CrossKV | None:
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def put(self, key: bytes, kv: CrossKV) -> None:
        """Keep it; a source that alone is larger than ``max_bytes`` is not kept."""
        self._kept.put(key, kv, sum(tensor.nbytes for tensor in kv))


def cross_bytes(spec: DecoderSpec) -> int:
    """Bytes of the K/V of one token of a source, over all layers: cross K/V, or a decoder-only model's own."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.d_kv * spec.tensors["1.self_k"].element_size()


class Prefill:
    """Encodes sources in calls of one shape each: ``rows`` x a multiple of ``multiple`` tokens.

    A source's padded length is its own, and a call has ``rows`` rows whoever is in it: what a source encodes to
    does not depend on its mates, to the bit.
    """

    padded_calls = True

    def __init__(
        self,
        encode: Encode,
        cross: Cross,
        rows: int,
        multiple: int,
        max_source: int,
        device: torch.device,
    ) -> None:
        self._encode, self._cross, self.rows, self._multiple = encode, cross, rows, multiple
        self._max_source, self._device = max_source, device

    def padded(self, length: int) -> int:
        """Tokens that a source of this length is padded to."""
        return padded_length(length, self._multiple, self._max_source)

    def alike(self, length: int) -> int:
        """Sources for which this is the same number may be encoded together."""
        return self.padded(length)

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[CrossKV]:
        """Cross K/V of at most ``rows`` sources of one padded length."""
        length = self.padded(max(len(source) for source in sources))
        ids = torch.zeros((self.rows, length), dtype=torch.long)
        mask = torch.zeros((self.rows, length), dtype=torch.bool)
        mask[:, 0] = True  # a row without any position would be NaN
        for i, source in enumerate(sources):
            ids[i, : len(source)] = torch.tensor(list(source))
            mask[i, : len(source)] = True
        keys, values = self._cross(self._encode(ids.to(self._device), mask.to(self._device)))
        return [
            (keys[:, i, :, : len(source)].clone(), values[:, i, :, : len(source)].clone())
            for i, source in enumerate(sources)
        ]
