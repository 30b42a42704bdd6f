"""Quality against depth of several models on the same articles, and how deep each runs where their quality is equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from .trials import Row


@dataclass(frozen=True)
class Curve:
    """Points of one model, deepest first: full depth, then thresholds.

    Attributes:
        scores: (points, articles) ROUGE-L.
        layers: (points, articles) layers that ran with the article's tokens in them, summed over its tokens.
        tokens: (points, articles).
    """

    scores: Float[np.ndarray, "points articles"]
    layers: Float[np.ndarray, "points articles"]
    tokens: Float[np.ndarray, "points articles"]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Curve":
        """From rows that hold lists over the same articles."""
        found = cls(
            *(np.array([row[name] for row in rows], dtype=np.float64) for name in ("scores", "layers", "tokens"))
        )
        order = np.argsort(-found.depths(slice(None)), kind="stable")
        return cls(found.scores[order], found.layers[order], found.tokens[order])

    def depths(self, which: Any) -> Float[np.ndarray, " points"]:
        """Mean layers of a token, of these articles."""
        found: np.ndarray = self.layers[:, which].sum(axis=1) / self.tokens[:, which].sum(axis=1)
        return found

    def depth_at(self, quality: float, which: Any = slice(None)) -> float:
        """Layers at which the curve, coming from full depth, first falls below a mean ROUGE-L; between points linear.

        NaN where full depth is below from the start, and where the curve never falls below: no threshold of the grid
        tells how many layers that quality needs.
        """
        depth, score = self.depths(which), self.scores[:, which].mean(axis=1)
        below = np.flatnonzero(score < quality)
        if not len(below) or below[0] == 0:
            return float("nan")
        first = int(below[0])
        share = (score[first - 1] - quality) / (score[first - 1] - score[first])
        return float(depth[first - 1] + share * (depth[first] - depth[first - 1]))


def at_equal_quality(plain: Curve, other: Curve, close: float, seed: int, resamples: int) -> dict[str, float | None]:
    """Layers of both where ROUGE-L is ``close`` below the plain model's full depth, and their difference.

    Intervals are 95 %, over articles: each resample asks both models the same ones, and moves the quality asked with
    the plain model's full depth. None where one of them has no such point; an interval is of the resamples that have,
    and left out where these are less than 95 % (``reached``).
    """
    generator = np.random.default_rng(seed)
    articles = plain.scores.shape[1]

    def both(which: Any) -> tuple[float, float]:
        quality = float(plain.scores[0, which].mean()) - close
        return plain.depth_at(quality, which), other.depth_at(quality, which)

    own, theirs = both(slice(None))
    again = np.array([both(generator.integers(0, articles, articles)) for _ in range(resamples)])
    apart = again[:, 0] - again[:, 1]
    found: dict[str, float | None] = {"reached": float(np.isfinite(apart).mean())}
    spreads = (("plain_layers", own, again[:, 0]), ("layers", theirs, again[:, 1]), ("fewer", own - theirs, apart))
    for name, middle, values in spreads:
        kept = values[np.isfinite(values)]
        known = np.isfinite(middle) and len(kept) >= 0.95 * resamples
        ends = [float(end) for end in np.quantile(kept, [0.025, 0.975])] if known else [None, None]
        found |= {name: float(middle) if np.isfinite(middle) else None, f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return found
