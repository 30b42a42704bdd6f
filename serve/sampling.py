"""From logits to a token where the argmax is not what is wanted: temperature, top-p, tokens that may not come yet.

A row's draws depend on its seed and on the position alone: no generator is shared, so mates change nothing and a
repeated request draws the same.
"""

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor

from .options import RequestOptions


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) for a position of a request."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def masked(
    logits: Float[Tensor, " vocab"], step: int, options: RequestOptions, ends: list[int]
) -> Float[Tensor, " vocab"]:
    """Logits without the tokens that would end the answer before ``min_tokens``."""
    if step + 1 >= options.min_tokens:
        return logits
    logits = logits.clone()
    logits[ends] = float("-inf")
    return logits


def draw(logits: Float[Tensor, " vocab"], temperature: float, top_p: float, number: float) -> int:
    """The token at which the cumulated probability, most probable first, passes ``number`` of the top-p mass.

    Top-p keeps the fewest tokens whose probability reaches ``top_p``; at least one.
    """
    scaled = (logits.double() - float(logits.max())) / temperature  # differences: no temperature is too low
    order = torch.sort(scaled, descending=True, stable=True)
    mass = order.values.softmax(dim=-1).cumsum(dim=-1)
    kept = int((mass < top_p).sum()) + 1
    kept = min(kept, mass.shape[0])
    place = int((mass[:kept] <= number * float(mass[kept - 1])).sum())
    return int(order.indices[min(place, kept - 1)])


def choose(
    logits: Float[Tensor, " vocab"], step: int, options: RequestOptions, seed: int, ends: list[int]
) -> int | None:
    """The token of one row; None where its logits are no numbers."""
    allowed = masked(logits.float(), step, options, ends)
    top = float(allowed.max())
    if not -float("inf") < top < float("inf"):
        return None
    if options.greedy:
        return int(allowed.argmax())
    return draw(allowed, options.temperature, options.top_p, uniform(seed, step))
