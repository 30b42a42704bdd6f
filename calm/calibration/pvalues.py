"""P-values for the mean of losses bounded by [0, 1] (Learn then Test, Angelopoulos et al. 2021, section 3).

The null hypothesis of a threshold is "its true mean loss exceeds the tolerance"; a p-value is valid when under the
null it falls below u with probability at most u. n rows, r their mean loss, a the tolerance:

    Hoeffding:            exp(-2 n max(0, a - r)^2)
    Hoeffding-Bentkus:    min(exp(-n h1(min(r, a), a)),  e * P(Binomial(n, a) <= ceil(n r)))

h1(x, a) = x ln(x/a) + (1-x) ln((1-x)/(1-a)). The factor e is Bentkus' price for losses that are bounded but not
binary, which ROUGE losses are. Pure functions; every argument may be an array.
"""

import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlog1py, xlogy
from scipy.stats import binom

from ..config import check_range
from ..errors import CalibrationError

Floats = NDArray[np.float64]
Numbers = SupportsFloat | Sequence[Any] | NDArray[Any]


def _checked(mean_loss: Numbers, n: Numbers, tolerance: Numbers) -> tuple[Floats, NDArray[np.int64], Floats]:
    mean = np.asarray(mean_loss, dtype=np.float64)
    rows = np.asarray(n, dtype=np.int64)
    limit = np.asarray(tolerance, dtype=np.float64)
    if not ((mean >= 0.0) & (mean <= 1.0)).all():
        raise CalibrationError(f"a mean loss must lie in [0, 1], got {mean_loss!r}")
    if not (rows >= 1).all():
        raise CalibrationError(f"a p-value needs n >= 1 rows, got {n!r}")
    if not ((limit > 0.0) & (limit < 1.0)).all():
        raise CalibrationError(f"tolerance must lie in (0, 1), got {tolerance!r}")
    return mean, rows, limit


def hoeffding(mean_loss: Numbers, n: Numbers, tolerance: Numbers) -> Any:
    """Hoeffding's p-value; float64 of the arguments' common shape."""
    mean, rows, limit = _checked(mean_loss, n, tolerance)
    return np.exp(-2.0 * rows * np.maximum(0.0, limit - mean) ** 2)


def bernoulli_divergence(x: Numbers, a: Numbers) -> Any:
    """h1(x, a), the Kullback-Leibler divergence of Bernoulli(x) from Bernoulli(a); 0 ln 0 = 0, a in (0, 1)."""
    x, a = np.asarray(x, dtype=np.float64), np.asarray(a, dtype=np.float64)
    value = xlogy(x, x) - xlogy(x, a) + xlog1py(1.0 - x, -x) - xlog1py(1.0 - x, -a)
    return np.maximum(value, 0.0)


def loss_sum_ceiling(mean_loss: Numbers, n: Numbers) -> Any:
    """ceil(n r), where an n r within 1e-9 of an integer is that integer: 1000 * 0.035 is 35.00000000000001."""
    total = np.asarray(mean_loss, dtype=np.float64) * np.asarray(n)
    nearest = np.rint(total)
    return np.where(np.abs(total - nearest) < 1e-9, nearest, np.ceil(total))


def hoeffding_bentkus(mean_loss: Numbers, n: Numbers, tolerance: Numbers) -> Any:
    """The p-value that calibration uses; float64 of the arguments' common shape, at most 1."""
    mean, rows, limit = _checked(mean_loss, n, tolerance)
    tail_hoeffding = np.exp(-rows * bernoulli_divergence(np.minimum(mean, limit), limit))
    tail_bentkus = math.e * binom.cdf(loss_sum_ceiling(mean, rows), rows, limit)
    return np.minimum(1.0, np.minimum(tail_hoeffding, tail_bentkus))


def needed_n(tolerance: float, error_prob: float, mean_loss: float = 0.0) -> int:
    """The smallest n at which a mean loss of ``mean_loss`` passes; below it nothing of that loss can.

    Raises:
        CalibrationError: ``mean_loss`` is not below ``tolerance``: no n is enough.
    """
    check_range("error_prob", error_prob, 0, 1, open_low=True, open_high=True)
    if not 0.0 <= mean_loss < tolerance:
        raise CalibrationError(
            f"mean loss {mean_loss} is not below tolerance {tolerance}: no number of rows certifies it"
        )
    start, stop = 1, 1024
    while True:
        candidates = np.arange(start, stop)
        passing = np.flatnonzero(hoeffding_bentkus(mean_loss, candidates, tolerance) <= error_prob)
        if passing.size:
            return int(candidates[passing[0]])
        start, stop = stop, stop * 4


def largest_passing_mean(n: int, tolerance: float, error_prob: float) -> float | None:
    """The largest mean loss that passes at ``n`` rows, to 1e-6; None where not even 0 does."""
    if hoeffding_bentkus(0.0, n, tolerance) > error_prob:
        return None
    low, high = 0.0, tolerance  # low passes, high does not: its p-value is 1 or e/2 at least
    while high - low > 1e-6:
        middle = (low + high) / 2
        if hoeffding_bentkus(middle, n, tolerance) <= error_prob:
            low = middle
        else:
            high = middle
    return low
