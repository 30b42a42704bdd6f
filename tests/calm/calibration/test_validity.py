"""Does the procedure keep its promise? Many calibrations on losses whose true risk is known.

A trial fails when anything certified has a true risk above the tolerance. The promise holds when even the one-sided
95 % Clopper-Pearson upper bound of the failure rate stays within error_prob. Each way of losing the guarantee that is
known from other code must be caught: its lower bound must lie above error_prob on at least one truth.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta

from calm.calibration.pvalues import hoeffding_bentkus
from calm.calibration.testing import fixed_sequence

TRIALS, N, TOLERANCE, ERROR_PROB = 4000, 400, 0.05, 0.05
Floats = NDArray[np.float64]
Procedure = Callable[[Floats], NDArray[np.bool_]]  # (trials, thresholds) p-values -> certified

MONOTONE = np.array([0.002, 0.005, 0.01, 0.015, 0.02, 0.051, 0.07, 0.09, 0.12, 0.2])
NON_MONOTONE = np.array([0.005, 0.015, 0.01, 0.055, 0.02, 0.01, 0.052, 0.03, 0.051, 0.005, 0.06, 0.02])
JUST_ABOVE = np.full(24, 0.0501)


def nested_losses(generator: np.random.Generator, risks: Floats) -> Floats:
    """Mean binary losses where all thresholds share each row's difficulty."""
    order = np.sort(np.unique(risks))
    shares = np.diff(np.concatenate([[0.0], order, [1.0]]))
    counts = generator.multinomial(N, shares, size=TRIALS).cumsum(axis=1)[:, : len(order)]
    return counts[:, np.searchsorted(order, risks)] / N


def independent_losses(generator: np.random.Generator, risks: Floats) -> Floats:
    return generator.binomial(N, risks, size=(TRIALS, len(risks))) / N


def bounded_losses(generator: np.random.Generator, risks: Floats) -> Floats:
    """Means of losses that are 0, or uniform in [0, 1] where the row is hit: bounded, far from binary."""
    means = np.empty((TRIALS, len(risks)))
    for start in range(0, TRIALS, 500):
        hit = generator.random((500, N), dtype=np.float32)
        size = generator.random((500, N), dtype=np.float32)
        for k, risk in enumerate(risks):
            means[start : start + 500, k] = np.where(hit < 2 * risk, size, 0.0).mean(axis=1)
    return means


TRUTHS = {
    "monotone": (nested_losses, MONOTONE),
    "non-monotone": (nested_losses, NON_MONOTONE),
    "just above, independent": (independent_losses, JUST_ABOVE),
    "bounded, not binary": (bounded_losses, MONOTONE),
}


@pytest.fixture(scope="module")
def p_values() -> dict[str, tuple[Floats, Floats]]:
    """Per truth the true risks and the p-values of all trials, (trials, thresholds) in the order of testing."""
    result = {}
    for seed, (name, (draw, risks)) in enumerate(TRUTHS.items()):
        means = draw(np.random.default_rng(seed), risks)
        distinct, where = np.unique(means, return_inverse=True)
        result[name] = (risks, hoeffding_bentkus(distinct, N, TOLERANCE)[where].reshape(means.shape))
    return result


def failures(certified: NDArray[np.bool_], risks: Floats) -> int:
    return int((certified & (risks > TOLERANCE)).any(axis=1).sum())


def upper_bound(count: int, trials: int) -> float:
    """One-sided 95 % Clopper-Pearson."""
    return 1.0 if count == trials else float(beta.ppf(0.95, count + 1, trials - count))


def lower_bound(count: int, trials: int) -> float:
    return 0.0 if count == 0 else float(beta.ppf(0.05, count, trials - count + 1))


def certify(p: Floats) -> NDArray[np.bool_]:
    return fixed_sequence(p, ERROR_PROB)


@pytest.mark.parametrize("truth", TRUTHS)
def test_failure_rate_stays_within_error_prob(p_values: dict[str, tuple[Floats, Floats]], truth: str) -> None:
    risks, p = p_values[truth]
    assert p.shape[0] >= 2000
    assert upper_bound(failures(certify(p), risks), TRIALS) <= ERROR_PROB


def test_truths_are_no_easy_prey(p_values: dict[str, tuple[Floats, Floats]]) -> None:
    """Something certifiable is certified in most trials, except where nothing is certifiable."""
    for risks, p in p_values.values():
        if (risks <= TOLERANCE).any():
            assert certify(p)[:, 0].mean() > 0.9


def no_stop(p: Floats) -> NDArray[np.bool_]:
    return p <= ERROR_PROB


def first_failing_returned(p: Floats) -> NDArray[np.bool_]:
    certified = certify(p)
    certified[np.arange(len(p)), np.minimum(certified.sum(axis=1), p.shape[1] - 1)] = True
    return certified


def ascending_first_pass(p: Floats) -> NDArray[np.bool_]:
    passed = (p <= ERROR_PROB)[:, ::-1]
    only_first = passed & (passed.cumsum(axis=1) == 1)
    return only_first[:, ::-1]


def order_from_the_data(p: Floats) -> NDArray[np.bool_]:
    order = np.argsort(p, axis=1, kind="stable")
    certified = np.zeros(p.shape, dtype=bool)
    np.put_along_axis(certified, order, certify(np.take_along_axis(p, order, axis=1)), axis=1)
    return certified


@pytest.mark.parametrize("mutant", [no_stop, first_failing_returned, ascending_first_pass, order_from_the_data])
def test_a_procedure_without_guarantee_is_caught(p_values: dict[str, tuple[Floats, Floats]], mutant: Procedure) -> None:
    bounds = [lower_bound(failures(mutant(p), risks), TRIALS) for risks, p in p_values.values()]
    assert max(bounds) > ERROR_PROB


def test_the_best_of_several_measures_needs_its_share_of_error_prob() -> None:
    """Eight measures, none good enough: any of them certified is a failure of the choice between them."""
    measures = 8
    means = independent_losses(np.random.default_rng(9), np.full(measures, 0.0501))
    p = hoeffding_bentkus(means, N, TOLERANCE)

    def failing(level: float) -> int:
        return int(np.any([fixed_sequence(p[:, [k]], level)[:, 0] for k in range(measures)], axis=0).sum())

    assert upper_bound(failing(ERROR_PROB / measures), TRIALS) <= ERROR_PROB
    assert lower_bound(failing(ERROR_PROB), TRIALS) > ERROR_PROB


def power(p: Floats, target: int) -> float:
    """Share of trials in which the member ``target`` is certified."""
    return float(certify(p)[:, target].mean())


@pytest.fixture(scope="module")
def power_p_values() -> Floats:
    """n = 1000, binary losses (the largest variance), true risk .025 at the sixth of nine thresholds."""
    risks = np.array([0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.06, 0.1, 0.2])
    shares = np.diff(np.concatenate([[0.0], risks, [1.0]]))
    counts = np.random.default_rng(5).multinomial(1000, shares, size=TRIALS).cumsum(axis=1)[:, : len(risks)]
    return np.asarray(hoeffding_bentkus(counts / 1000, 1000, TOLERANCE))


def test_a_good_threshold_is_found(power_p_values: Floats) -> None:
    assert power(power_p_values, target=5) >= 0.95


def test_reversed_order_is_valid_and_finds_nothing(power_p_values: Floats) -> None:
    backwards = power_p_values[:, ::-1]
    assert power(backwards, target=3) < 0.95
    assert certify(backwards).sum() == 0


def test_a_good_threshold_is_found_at_a_third_of_error_prob_too() -> None:
    """Three measures to pick from: each is tested at error_prob / 3, still with binary losses of n = 1000."""
    counts = np.random.default_rng(6).binomial(1000, 0.025, size=TRIALS)
    p = np.asarray(hoeffding_bentkus(counts / 1000, 1000, TOLERANCE))
    assert (p <= ERROR_PROB / 3).mean() >= 0.95
