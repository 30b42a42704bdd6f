"""Grids: 1.0 first, descending, distinct, from dev's confidences, whatever ties there are."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.calibration.grid import (
    BELOW_ONE,
    check_grid,
    collect_flips,
    equal_depth_values,
    flip_thresholds,
    layer_path,
    scalar_grid,
)
from calm.config import Schedule
from calm.errors import CalibrationError
from calm.records import DecodeTrace
from calm.thresholds import ThresholdSchedule

KINDS = [Schedule.constant, Schedule.decaying, Schedule.decaying_released]


def flips_of(values: list[float]) -> np.ndarray:
    return flip_thresholds(np.array(values)[:, None], Schedule.constant, 4.0, 10)


def test_a_grid_is_one_then_at_least_twenty_distinct_descending_values() -> None:
    grid = scalar_grid(flips_of(np.random.default_rng(0).random(5000).tolist()), 20)
    assert len(grid) == 21
    check_grid(grid)
    assert grid[1:] == pytest.approx(np.arange(19, -1, -1) / 20, abs=0.03)  # equal shares of uniform confidences


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.50001, 0.9, 0.99, 1.0]), min_size=1), st.integers(1, 25))
def test_ties_take_one_place_and_the_smallest_is_last(values: list[float], size: int) -> None:
    grid = scalar_grid(flips_of(values), size)
    check_grid(grid)
    distinct = {min(value, BELOW_ONE) for value in values}
    assert len(grid) == 1 + min(size, len(distinct))
    assert grid[-1] == np.float32(min(distinct))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=200), st.integers(1, 25))
def test_every_member_is_an_observed_confidence(values: list[float], count: int) -> None:
    array = np.array(values)
    chosen = equal_depth_values(array, count)
    assert set(chosen) <= set(values)
    assert chosen == sorted(set(chosen), reverse=True)
    assert len(chosen) == min(count, len(set(values)))
    assert chosen[-1] == min(values)


def test_a_saturated_confidence_gets_a_threshold_that_lets_it_exit() -> None:
    grid = scalar_grid(flips_of([1.0] * 50), 20)
    assert grid == [1.0, BELOW_ONE]
    assert np.float32(grid[1]) < np.float32(1.0)
    assert ThresholdSchedule(grid[0]).exits_off
    assert not ThresholdSchedule(BELOW_ONE).exits_off


def test_a_heavy_tie_does_not_starve_the_rest() -> None:
    values = [1.0] * 900 + np.linspace(0.0, 0.9, 100).tolist()
    grid = scalar_grid(flips_of(values), 20)
    assert len(grid) == 21
    assert grid[1] == BELOW_ONE
    assert max(a - b for a, b in zip(grid[2:], grid[3:], strict=False)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_flip_threshold_is_where_the_decision_changes(kind: Schedule) -> None:
    generator = np.random.default_rng(1)
    confidences = generator.random((12, 3))
    flips = flip_thresholds(confidences, kind, tau=4.0, length=12)
    for (step, layer), flip in np.ndenumerate(flips):
        confidence = confidences[step, layer]
        if 1e-6 < flip < BELOW_ONE - 3e-6:
            above = ThresholdSchedule(flip + 3e-6, kind, 4.0, 12).at(step, layer + 1)
            below = ThresholdSchedule(flip - 2e-7, kind, 4.0, 12).at(step, layer + 1)
            assert below < confidence < above
        if flip == BELOW_ONE:  # even the largest threshold below 1 lets it exit
            assert confidence >= ThresholdSchedule(BELOW_ONE, kind, 4.0, 12).at(step, layer + 1)


def test_decaying_just_below_one_is_not_full_depth_and_its_grid_says_so() -> None:
    late = flip_thresholds(np.full((10, 1), 0.95), Schedule.decaying, tau=4.0, length=10)
    assert late[-1, 0] == BELOW_ONE
    assert late[0, 0] == pytest.approx((0.95 - 0.1) / 0.9, abs=1e-5)


def make_trace(confidences: list[tuple[float, ...]]) -> DecodeTrace:
    n = len(confidences)
    return DecodeTrace("r", (5,) * n, "", (3,) * n, (3,) * n, (3,) * n, (0,) * n, tuple(confidences))


def test_flips_are_of_checked_layers_only_and_nan_is_left_out() -> None:
    trace = make_trace([(math.nan, 0.2, 0.3, math.nan), (math.nan, 0.4, 0.5, math.nan)])
    flips = collect_flips([trace], (1, 3), Schedule.constant, 4.0, 10)
    assert flips.shape == (2, 2)
    assert scalar_grid(flips, 20) == [1.0, pytest.approx(0.5), pytest.approx(0.3)]


def test_traces_without_confidences_are_refused() -> None:
    bare = DecodeTrace("r7", (5,), "", (3,), (3,), (3,), (0,))
    with pytest.raises(CalibrationError, match="'r7' holds no confidences"):
        collect_flips([bare], (1,), Schedule.constant, 4.0, 10)
    with pytest.raises(CalibrationError, match="says nothing at any checked layer"):
        collect_flips([make_trace([(math.nan, 0.5)])], (1,), Schedule.constant, 4.0, 10)


def test_a_path_lowers_every_layer_together() -> None:
    generator = np.random.default_rng(2)
    flips = np.stack([generator.random(400) * 0.5, np.full(400, math.nan), generator.random(400)], axis=1)
    path = layer_path(flips, exit_layers=(1, 2, 4), num_layers=6, size=20)
    check_grid(path)
    assert len(path) == 21
    for vector in path[1:]:
        assert isinstance(vector, tuple)
        assert len(vector) == 5
        assert vector[1] == vector[2] == vector[4] == 1.0  # no confidence, or not checked
        assert vector[0] < 0.5
    first, last = path[1], path[-1]
    assert isinstance(first, tuple) and isinstance(last, tuple)
    assert first[3] == pytest.approx(0.95, abs=0.03)
    assert last[3] == pytest.approx(0.0, abs=0.03)


def test_a_path_over_constant_confidences_has_one_vector() -> None:
    path = layer_path(np.full((30, 2), 0.25), exit_layers=(1, 2), num_layers=3, size=20)
    assert path == [1.0, (0.25, 0.25)]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "starts with 1.0"),
        ([0.9, 0.8], "starts with 1.0"),
        ([1.0, 1.0], "without repeats"),
        ([1.0, 0.8, 0.9], "must descend"),
        ([1.0, 0.8, 0.8], "without repeats"),
        ([1.0, -0.1], r"lie in \[0, 1\]"),
        ([1.0, float("nan")], r"lie in \[0, 1\]"),
        ([1.0, (0.5, 0.5), 0.4], "not a mixture"),
        ([1.0, (0.5, 0.5), (0.4,)], "not a mixture"),
        ([1.0, (0.5, 0.5), (0.6, 0.1)], "must descend"),
    ],
)
def test_a_grid_out_of_order_is_refused(grid: list[float], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        check_grid(grid)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_hangs_on_rounding(kind: Schedule) -> None:
    """A confidence of few values: at every member of the grid each decision is the same in single and double."""
    confidences = np.tile(np.float32([1 / 3, 2 / 3, 1.0]), (12, 1)).astype(np.float64)
    flips = flip_thresholds(confidences, kind, tau=4.0, length=12)
    for threshold in scalar_grid(flips, 20)[1:]:
        assert isinstance(threshold, float)
        for step in range(12):
            limit = ThresholdSchedule(threshold, kind, 4.0, 12).at(step, 1)
            in_double = confidences[step] >= limit
            in_single = confidences[step].astype(np.float32) >= np.float32(limit)
            assert (in_double == in_single).all()
