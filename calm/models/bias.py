"""T5's relative positions, without any model."""

import math

import torch
from jaxtyping import Int
from torch import Tensor


def relative_bucket_row(step: int, buckets: int, max_distance: int) -> Int[Tensor, " keys"]:
    """T5's causal bucket of the distances from query position ``step`` to key positions 0..step.

    The first half of the buckets are exact distances, the rest grow logarithmically up to ``max_distance``.
    """
    distance = torch.arange(step, -1, -1)
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)
