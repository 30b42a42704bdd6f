"""T5's relative positions, without any model."""

import math

import torch
from jaxtyping import Int
from torch import Tensor


def relative_bucket_row(step: int, buckets: int, max_distance: int) -> Int[Tensor, " keys"]:
    """T5's causal bucket of the distances from query position ``step`` to key positions 0..step.

    The first half of the buckets are exact distances, the rest grow logarithmically up to ``max_distance``.
    """
    return _bucket(torch.arange(step, -1, -1), buckets, max_distance)


def relative_buckets_both_ways(length: int, buckets: int, max_distance: int) -> Int[Tensor, " distances"]:
    """T5's bucket, in an encoder, of key position minus query position from ``1 - length`` to ``length - 1``.

    Half of the buckets are for keys behind the query.
    """
    ahead = torch.arange(1 - length, length)
    half = buckets // 2
    return _bucket(ahead.abs(), half, max_distance) + half * (ahead > 0)


def _bucket(distance: Int[Tensor, " keys"], buckets: int, max_distance: int) -> Int[Tensor, " keys"]:
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)
