"""How deep an article's tokens will go, told from what the encoder makes of its source, before a token is decoded.

The encoder's output is averaged over the tokens of the source, and a ridge regression on it predicts the mean crossing
layer of the answer. Articles are predicted by a regression on other folds (cross-fitting): none predicts itself. The
penalty is chosen on the articles of the fit alone, by its closed leave-one-out error.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from calm.errors import CalmError
from calm.metrics import with_interval

if TYPE_CHECKING:
    from calm.models.t5 import EarlyExitT5

PENALTIES = np.logspace(-2, 6, 17)
BATCH = 64  # articles that are encoded at once


def pooled(model: "EarlyExitT5", sources: Sequence[Sequence[int]]) -> Float[np.ndarray, "articles d_model"]:
    """The encoder's output of each source, mean over its tokens."""
    import torch

    from calm.data.collate import pad

    found = np.zeros((len(sources), model.hf.config.d_model))
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    device = next(model.parameters()).device
    with torch.inference_mode():
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            ids, mask = (each.to(device) for each in pad([sources[number] for number in chosen]))
            hidden = model.encode(ids, mask).double() * mask[:, :, None]
            found[chosen] = (hidden.sum(dim=1) / mask.sum(dim=1, keepdim=True)).cpu().numpy()
    return found


def cross_fitted(
    features: Float[np.ndarray, "articles features"], target: Float[np.ndarray, " articles"], folds: int, seed: int
) -> Float[np.ndarray, " articles"]:
    """Each article's prediction by the articles of the other folds.

    Raises:
        CalmError: there are fewer than two articles a fold.
    """
    if len(target) < 2 * folds:
        raise CalmError(f"{folds} folds need {2 * folds} articles, got {len(target)}")
    fold = np.random.default_rng(seed).permutation(len(target)) % folds
    found = np.zeros(len(target))
    for number in range(folds):
        held = fold == number
        found[held] = ridge(features[~held], target[~held], features[held])
    return found


def ridge(
    x: Float[np.ndarray, "articles features"],
    y: Float[np.ndarray, " articles"],
    new: Float[np.ndarray, "more features"],
) -> Float[np.ndarray, " more"]:
    """Predictions for ``new``; features are standardized, the penalty is the one with the least leave-one-out error."""
    middle, spread = x.mean(axis=0), x.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    u, s, v = np.linalg.svd((x - middle) / spread, full_matrices=False)
    along, best = u.T @ (y - y.mean()), (np.inf, 0.0)
    for penalty in PENALTIES:
        kept = s**2 / (s**2 + penalty)
        residual = (y - y.mean()) - u @ (kept * along)
        leverage = 1 / len(y) + (u**2) @ kept
        error = float(np.mean((residual / np.maximum(1 - leverage, 1e-9)) ** 2))
        best = min(best, (error, float(penalty)))
    weights = v.T @ (s / (s**2 + best[1]) * along)
    found: Float[np.ndarray, " more"] = y.mean() + ((new - middle) / spread) @ weights
    return found


def worth(
    predicted: Float[np.ndarray, " articles"], true: Float[np.ndarray, " articles"], seed: int, bootstrap: int
) -> dict[str, float]:
    """``r2`` of the predictions, their rank correlation (Spearman's) with the truth; 95 % intervals over articles."""
    draw = np.random.default_rng(seed)
    again = [draw.integers(0, len(true), len(true)) for _ in range(bootstrap)]
    found: dict[str, float] = {}
    for name, value in (("r2", _r2), ("rank", _rank)):
        low, high = np.nanquantile([value(predicted[each], true[each]) for each in again], [0.025, 0.975])
        found |= {name: value(predicted, true), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def _r2(predicted: np.ndarray, true: np.ndarray) -> float:
    total = float(((true - true.mean()) ** 2).sum())
    return 1 - float(((true - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def _rank(predicted: np.ndarray, true: np.ndarray) -> float:
    from scipy.stats import rankdata

    a, b = rankdata(predicted), rankdata(true)
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread > 0 else float("nan")


def between(crossing: Int[np.ndarray, "articles tokens"]) -> float:
    """Share of the variance of crossing layers that lies between articles and not inside them: all that a key of an
    article can tell. The estimator of a one-way analysis of variance with groups of unequal size, not below 0.
    """
    live = crossing > 0
    sizes, tokens = live.sum(axis=1), int(live.sum())
    means = crossing.sum(axis=1) / sizes
    inside = float(((crossing - means[:, None]) ** 2)[live].sum()) / max(tokens - len(sizes), 1)
    whole = float(crossing.sum()) / tokens
    among = float((sizes * (means - whole) ** 2).sum()) / max(len(sizes) - 1, 1)
    typical = (tokens - float((sizes**2).sum()) / tokens) / max(len(sizes) - 1, 1)
    extra = max(0.0, (among - inside) / typical)
    return extra / (extra + inside) if extra + inside > 0 else 0.0


def binned(
    predicted: Float[np.ndarray, " articles"],
    true: Float[np.ndarray, " articles"],
    bins: int,
    seed: int,
    bootstrap: int,
) -> list[dict[str, Any]]:
    """As many articles in each bin, by what was predicted: means of both, the true one with its interval."""
    parts = [part for part in np.array_split(np.argsort(predicted, kind="stable"), bins) if len(part)]
    return [
        {
            "bin": number,
            "articles": len(part),
            "predicted": float(predicted[part].mean()),
            **with_interval("true", true[part], seed, bootstrap),
        }
        for number, part in enumerate(parts, 1)
    ]
