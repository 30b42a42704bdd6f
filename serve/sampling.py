"""From logits to a token where the argmax is not what is wanted: temperature, top-p, tokens that may not come yet.

A row's draws depend on its seed and on the position alone: no generator is shared, so mates change nothing and a
repeated request draws the same.
"""

import hashlib

import numpy as np
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
    """The token at which the cumulated probability passes ``number`` of what may be drawn.

    Top-p keeps the fewest tokens whose probability reaches ``top_p``, at least one; those are cumulated with the most
    probable first, all of them (``top_p`` 1) by id.
    """
    values = logits.double().cpu().numpy()
    with np.errstate(over="ignore"):  # differences: no temperature is too low
        mass = np.exp((values - values.max()) / temperature)
    if top_p >= 1.0:
        return _where(mass.cumsum(), number)
    # tokens below an even share of what may be left out are never needed: together they are less than that
    likely = np.flatnonzero(mass >= 0.5 * (1.0 - top_p) * mass.sum() / len(mass))
    likely = likely[np.argsort(-mass[likely], kind="stable")]
    reached = mass[likely].cumsum()
    kept = int(np.searchsorted(reached, top_p * mass.sum())) + 1
    return int(likely[_where(reached[:kept], number)])


def _where(reached: "np.ndarray[tuple[int], np.dtype[np.float64]]", number: float) -> int:
    """The first place at which a sum that grows passes ``number`` of its end.

    A number is one of 2^53 cells and stands for its middle, so that 0 draws nothing of next to no probability. Where
    rounding makes that the end itself, it is the place that reached it, not one behind, which adds nothing.
    """
    end, passed = reached[-1], (number + 2.0**-54) * reached[-1]
    return min(int(np.searchsorted(reached, passed, side="right")), int(np.searchsorted(reached, end)))


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
