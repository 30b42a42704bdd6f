"""What is measured of decoded text: ROUGE-L, agreement with the full model, depth, a seeded interval.

rouge-score 0.1.2 is the definition: F1 of rougeL with its Porter stemmer and its own tokenizer, in 0..1. It lowers
the text and keeps ``[a-z0-9]`` only, so text in other scripts scores 0, and a pair without a word scores 0, not 1.
rouge-score-rs computes the same numbers faster and is used when it is installed; the tests hold the two equal.
Means are arithmetic, never a bootstrap median.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from .records import DecodeTrace, layers_not_run, layers_skipped, mean_layers

ROUGE_TYPE = "rougeL"


@cache
def _scorer(native: bool) -> Any:
    """One scorer a process: both libraries build stemmer and tables anew in the constructor."""
    if native:
        from rouge_score_rs import rouge_scorer
    else:
        from rouge_score import rouge_scorer
    return rouge_scorer.RougeScorer([ROUGE_TYPE], use_stemmer=True)


@cache
def _has_native() -> bool:
    return find_spec("rouge_score_rs") is not None


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of ROUGE-L, stemmed, in [0, 1]."""
    return float(_scorer(_has_native()).score(reference, prediction)[ROUGE_TYPE].fmeasure)


def rouge_l_many(predictions: Sequence[str], references: Sequence[str]) -> Float[np.ndarray, " rows"]:
    """``rouge_l`` of every pair, in order; ValueError when the two differ in length."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references; give one of each per row")
    score = _scorer(_has_native()).score
    pairs = zip(references, predictions, strict=True)
    return np.array([score(reference, text)[ROUGE_TYPE].fmeasure for reference, text in pairs], dtype=np.float64)


def metric_signature() -> str:
    """How the numbers of ``rouge_l`` come about, in one line: print it beside them."""
    implementation = f"rouge-score-rs-{version('rouge-score-rs')}" if _has_native() else "rouge-score"
    return (
        f"{ROUGE_TYPE}|score:f1|range:0-1|stem:porter|split:none|tok:lower+[a-z0-9]|mean:arithmetic"
        f"|definition:rouge-score-{version('rouge-score')}|implementation:{implementation}"
    )


def mean(values: Sequence[Any] | NDArray[Any]) -> float:
    """Arithmetic mean; ValueError without values or with a NaN among them."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"a mean needs finite values, got {array.size} values, {np.isnan(array).sum()} of them NaN")
    return float(array.mean())


def bootstrap_ci(
    values: Sequence[Any] | NDArray[Any], seed: int, n: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of the mean over ``n`` resamples of rows; the same seed gives the same interval."""
    array = np.asarray(values, dtype=np.float64)
    mean(array)  # the same demands
    if n < 1 or not 0 < level < 1:
        raise ValueError(f"a bootstrap needs n >= 1 and level in (0, 1), got n={n}, level={level}")
    generator = np.random.default_rng(seed)
    means = np.array([array[generator.integers(0, len(array), len(array))].mean() for _ in range(n)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def with_interval(name: str, values: Sequence[Any] | NDArray[Any], seed: int, n: int = 1000) -> dict[str, float]:
    """The mean over rows and its 95 % interval, as ``name``, ``name_low`` and ``name_high``."""
    low, high = bootstrap_ci(values, seed, n)
    return {name: mean(values), f"{name}_low": low, f"{name}_high": high}


_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|mr|mrs|ms|dr|prof|st|no|fig|inc|ltd|jr|sr|approx)|\b[A-Za-z])\.$", re.I
)
_BOUNDARY = re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|[。！？]|\n[ \t]*\n")


def with_ratio(name: str, sums: NDArray[Any], tokens: NDArray[Any], seed: int, n: int = 1000) -> dict[str, float]:
    """``name``, ``name_low``, ``name_high``: the mean over all tokens of articles that have such sums over so many
    tokens, and its 95 % interval over articles.

    The mean is a ratio of two sums; the bootstrap is of its linear part, whose mean over articles is the same number.
    """
    middle = float(sums.sum() / tokens.sum())
    low, high = bootstrap_ci(middle + (sums - middle * tokens) / tokens.mean(), seed, n)
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def median_interval(values: Iterable[Any]) -> tuple[float, float]:
    """Order statistics between which the median of the distribution lies with probability .95 at least, from six on."""
    from scipy.stats import binom

    ordered = sorted(map(float, values))
    outside = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)  # values left out at each end
    return ordered[outside], ordered[-1 - outside]


def with_median(name: str, values: Sequence[Any]) -> dict[str, float]:
    """``name``, ``name_low``, ``name_high``: the median of repeats and its interval, where there are six at least."""
    low, high = median_interval(values)
    return {name: float(np.median(values)), f"{name}_low": low, f"{name}_high": high}


def lead1(text: str) -> str:
    """The first sentence of ``text`` on one line: up to ., ! or ? before a blank, or up to an empty line.

    An abbreviation's or initial's full stop ends no sentence. Text without any end is returned whole.
    """
    text = text.strip()
    for match in _BOUNDARY.finditer(text):
        head = text[: match.end()]
        following = text[match.end() :].lstrip()[:1]
        if match.group().startswith(".") and (_ABBREVIATION.search(head) or following.islower()):
            continue
        return " ".join(head.split())
    return " ".join(text.split())


def _check_pairs(early: Sequence[DecodeTrace], full: Sequence[DecodeTrace]) -> None:
    if [trace.id for trace in early] != [trace.id for trace in full]:
        raise ValueError("early and full traces hold other rows or another order; decode the same examples with both")


def agreement(early: Sequence[DecodeTrace], full: Sequence[DecodeTrace]) -> dict[str, float]:
    """How close early-exit output is to the full model's.

    Returns ``rouge_l_to_full`` (mean; a row of equal tokens counts 1 even where ROUGE knows no word of it),
    ``equal_rows`` (share of rows with equal tokens) and ``equal_prefix`` (share of the full model's tokens that come
    before the first difference).
    """
    _check_pairs(early, full)
    same = np.array([a.tokens == b.tokens for a, b in zip(early, full, strict=True)])
    scores = rouge_l_many([trace.text for trace in early], [trace.text for trace in full])
    prefix = total = 0
    for a, b in zip(early, full, strict=True):
        total += len(b.tokens)
        prefix += next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), len(b.tokens))
    return {
        "rouge_l_to_full": mean(np.where(same, 1.0, scores)),
        "equal_rows": mean(same),
        "equal_prefix": prefix / total if total else 1.0,
    }


def depth_summary(traces: Sequence[DecodeTrace], num_layers: int) -> dict[str, Any]:
    """Layers per emitted token, EOS included: means, shares and the histogram of emission layers.

    A share of layers is not a speed-up: report wall clock beside it.
    """
    emission = np.array([layer for trace in traces for layer in trace.emission_layers], dtype=np.int64)
    if emission.size == 0:
        raise ValueError("depth needs at least one emitted token, got none")
    if emission.min() < 1 or emission.max() > num_layers:
        raise ValueError(f"emission layers {emission.min()}..{emission.max()} do not lie in 1..{num_layers}")
    return {
        "tokens": int(emission.size),
        "mean_layers": mean_layers(traces),
        "mean_crossing": mean([layer for trace in traces for layer in trace.crossing_layers]),
        "mean_executed": mean([layer for trace in traces for layer in trace.executed_layers]),
        "mean_backfilled": mean([layer for trace in traces for layer in trace.backfilled_layers]),
        "layers_skipped": layers_skipped(traces, num_layers),
        "layers_not_run": layers_not_run(traces, num_layers),
        "emission_histogram": np.bincount(emission, minlength=num_layers + 1)[1:].tolist(),
    }
