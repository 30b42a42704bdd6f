"""P-values against hand formulas, known feasibility figures, and exact super-uniformity."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtr, rel_entr
from scipy.stats import binom

from calm.calibration.pvalues import (
    bernoulli_divergence,
    hoeffding,
    hoeffding_bentkus,
    largest_passing_mean,
    loss_sum_ceiling,
    needed_n,
)
from calm.errors import CalibrationError, ConfigError


def by_hand(loss_sum: int, n: int, tolerance: float) -> float:
    """The formula of the paper from other functions of scipy, for losses that sum to a whole number."""
    r = loss_sum / n
    x = min(r, tolerance)
    divergence = float(rel_entr(x, tolerance) + rel_entr(1 - x, 1 - tolerance))
    return min(1.0, math.exp(-n * divergence), math.e * float(bdtr(loss_sum, n, tolerance)))


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.999))
def test_hoeffding_bentkus_equals_the_formula(n: int, share: float, tolerance: float) -> None:
    loss_sum = round(share * n)
    assert hoeffding_bentkus(loss_sum / n, n, tolerance) == pytest.approx(by_hand(loss_sum, n, tolerance), rel=1e-8)


def test_hoeffding_equals_the_formula() -> None:
    assert hoeffding(0.01, 1000, 0.05) == pytest.approx(math.exp(-2 * 1000 * 0.04**2))
    assert hoeffding(0.06, 1000, 0.05) == 1.0


def test_arrays_are_taken_element_by_element() -> None:
    means = np.array([[0.0, 0.02], [0.04, 1.0]])
    whole = hoeffding_bentkus(means, 500, 0.05)
    assert whole.shape == (2, 2)
    for index, value in np.ndenumerate(means):
        assert whole[index] == hoeffding_bentkus(value, 500, 0.05)


@pytest.mark.parametrize(
    ("n", "tolerance", "largest"), [(500, 0.05, 0.028), (1000, 0.05, 0.035), (1000, 0.02, 0.010), (5000, 0.02, 0.016)]
)
def test_largest_passing_mean_loss_at_five_percent(n: int, tolerance: float, largest: float) -> None:
    found = largest_passing_mean(n, tolerance, 0.05)
    assert found == pytest.approx(largest, abs=5e-4)
    assert hoeffding_bentkus(found, n, tolerance) <= 0.05
    assert hoeffding_bentkus(found + 1.1e-6, n, tolerance) > 0.05


def test_plain_hoeffding_needs_far_smaller_losses() -> None:
    assert hoeffding(0.0, 500, 0.05) > 0.05
    assert hoeffding(0.011, 1000, 0.05) < 0.05 < hoeffding(0.012, 1000, 0.05)


def test_divergence_at_the_edges_is_finite() -> None:
    assert bernoulli_divergence(0.0, 0.05) == pytest.approx(-math.log(0.95))
    assert bernoulli_divergence(1.0, 0.05) == pytest.approx(-math.log(0.05))
    assert bernoulli_divergence(0.05, 0.05) == 0.0
    assert hoeffding_bentkus(0.0, 100, 0.05) == pytest.approx(0.95**100)
    assert hoeffding_bentkus(1.0, 100, 0.05) == 1.0


def test_float_error_never_moves_the_loss_sum_to_the_next_whole_number() -> None:
    for n in range(1, 300):
        sums = np.arange(n + 1)
        assert (loss_sum_ceiling(sums / n, n) == sums).all()
    assert loss_sum_ceiling(0.0301, 100) == 4  # 3.01 is no float error
    assert loss_sum_ceiling(np.mean([0.1] * 10), 10) == 1  # ten tenths sum to 0.9999999999999999


@pytest.mark.parametrize(("n", "tolerance"), [(60, 0.05), (200, 0.05), (1000, 0.02), (300, 0.25)])
def test_p_value_is_super_uniform_under_the_null_exactly(n: int, tolerance: float) -> None:
    """Binary losses of mean just at the tolerance: P(p <= p(k)) = P(sum <= k) must not exceed p(k), for every k."""
    sums = np.arange(n + 1)
    p_values = hoeffding_bentkus(sums / n, n, tolerance)
    assert (np.diff(p_values) >= 0).all()
    assert (binom.cdf(sums, n, tolerance) <= p_values + 1e-12).all()


@pytest.mark.parametrize(("tolerance", "error_prob"), [(0.05, 0.05), (0.05, 0.05 / 3), (0.02, 0.01), (0.5, 0.4)])
def test_needed_n_is_the_smallest_that_can_pass(tolerance: float, error_prob: float) -> None:
    n = needed_n(tolerance, error_prob)
    assert hoeffding_bentkus(0.0, n, tolerance) <= error_prob
    assert n == 1 or hoeffding_bentkus(0.0, n - 1, tolerance) > error_prob
    assert n == math.ceil(math.log(error_prob) / math.log(1 - tolerance))
    assert largest_passing_mean(n - 1, tolerance, error_prob) is None if n > 1 else True


def test_needed_n_grows_with_the_loss_and_has_no_answer_at_the_tolerance() -> None:
    assert needed_n(0.05, 0.05) < needed_n(0.05, 0.05, 0.02) < needed_n(0.05, 0.05, 0.04)
    assert needed_n(0.01, 0.05, 0.009) > 4096  # beyond the first windows of the search
    with pytest.raises(CalibrationError, match="no number of rows certifies it"):
        needed_n(0.05, 0.05, 0.05)
    with pytest.raises(ConfigError, match="error_prob must lie in"):
        needed_n(0.05, 1.0)


@pytest.mark.parametrize(
    ("mean_loss", "n", "tolerance", "message"),
    [
        (0.1, 0, 0.05, "n >= 1"),
        (float("nan"), 10, 0.05, r"mean loss must lie in \[0, 1\]"),
        (-0.1, 10, 0.05, "mean loss must lie"),
        (1.1, 10, 0.05, "mean loss must lie"),
        (0.1, 10, 0.0, r"tolerance must lie in \(0, 1\)"),
        (0.1, 10, 1.0, "tolerance must lie"),
        (0.1, 10, float("nan"), "tolerance must lie"),
    ],
)
def test_what_is_no_loss_count_or_tolerance_is_refused(
    mean_loss: float, n: int, tolerance: float, message: str
) -> None:
    for p_value in (hoeffding, hoeffding_bentkus):
        with pytest.raises(CalibrationError, match=message):
            p_value(mean_loss, n, tolerance)


def test_numpy_integers_are_counts_too() -> None:
    assert hoeffding_bentkus(0.01, np.int64(500), 0.05) == hoeffding_bentkus(0.01, 500, 0.05)
