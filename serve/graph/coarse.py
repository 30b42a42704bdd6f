"""Cross-attention K and V in int8: whole numbers, each of a step that the largest of its group fixes.

Keys share a step by position and values by number, so that both steps stand outside the sums of an attention.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

MOST = 127  # steps


def in_steps(numbers: Float[Tensor, "..."], dim: int) -> tuple[Int8[Tensor, "..."], Float[Tensor, "..."]]:
    """Numbers along ``dim`` in steps of their largest; a group with a number that is none has a step of NaN."""
    numbers = numbers.float()
    top = numbers.abs().amax(dim, keepdim=True)
    least = torch.finfo(torch.float32).tiny  # a step that rounds to zero would divide by it
    step = torch.where(top == 0, 1.0, torch.where(top.isfinite(), (top / MOST).clamp(min=least), float("nan")))
    return (numbers / step).round().nan_to_num(0.0).to(torch.int8), step
