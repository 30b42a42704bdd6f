"""The certified prefix: stops at the first failure, never returns it, never looks at what follows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.calibration.testing import certified_points, fixed_sequence
from calm.errors import CalibrationError, ConfigError

P_VALUES = st.lists(st.floats(0, 1), max_size=25)


@given(P_VALUES, st.floats(0.001, 0.999))
def test_certified_is_exactly_the_leading_run(p_values: list[float], error_prob: float) -> None:
    expected = []
    for index, p_value in enumerate(p_values):
        if p_value > error_prob:
            break
        expected.append(index)
    assert certified_points(range(len(p_values)), p_values, error_prob) == expected
    assert np.flatnonzero(fixed_sequence(p_values, error_prob)).tolist() == expected


@given(P_VALUES, st.floats(0.001, 0.999), st.randoms())
def test_nothing_after_the_first_failure_matters(p_values: list[float], error_prob: float, chance: object) -> None:
    certified = certified_points(range(len(p_values)), p_values, error_prob)
    keep = len(certified) + 1
    other = p_values[:keep] + [0.0] * len(p_values[keep:])
    assert certified_points(range(len(other)), other, error_prob) == certified


def test_the_threshold_is_the_last_that_passed_never_the_first_that_failed() -> None:
    grid = [1.0, 0.9, 0.8, 0.7, 0.6]
    assert certified_points(grid, [0.0, 0.01, 0.05, 0.051, 0.0], 0.05) == [1.0, 0.9, 0.8]  # equal to the level passes
    assert certified_points(grid, [0.0, 0.2, 0.0, 0.0, 0.0], 0.05) == [1.0]
    assert certified_points(grid, [0.2, 0.0, 0.0, 0.0, 0.0], 0.05) == []
    assert certified_points(grid, [0.0] * 5, 0.05) == grid


def test_what_was_not_tested_is_not_certified() -> None:
    assert certified_points([1.0, 0.9, 0.8], [0.0, 0.01], 0.05) == [1.0, 0.9]
    assert certified_points([1.0], [], 0.05) == []
    with pytest.raises(CalibrationError, match="3 p-values for 2 thresholds"):
        certified_points([1.0, 0.9], [0.0, 0.0, 0.0], 0.05)


def test_many_trials_at_once() -> None:
    passed = fixed_sequence([[0.0, 0.1, 0.0], [0.0, 0.0, 0.9]], 0.05)
    assert passed.tolist() == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.5])
def test_what_is_no_p_value_is_refused(bad: float) -> None:
    with pytest.raises(CalibrationError, match=r"p-values must lie in \[0, 1\]"):
        fixed_sequence([0.0, bad], 0.05)


@pytest.mark.parametrize("bad", [0.0, 1.0, float("nan"), -1.0])
def test_what_is_no_error_probability_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"error_prob must lie in \(0, 1\)"):
        fixed_sequence([0.0], bad)
