"""Layers by position: the paper's formula and numbers, and no hole that attention could meet."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calm.config import CONF_DIR, SkipScheduleConfig
from calm.errors import ConfigError
from calm.layer_schedule import Decay, LayerSchedule, Side, check_monotone

TABLE_2 = {  # layers on average, at the last position, at the first
    "opt_6_7b": (32, {2: (16, 11, 22), 3: (11, 8, 14), 4: (8, 6, 10), 5: (6.5, 5, 8)}),
    "opt_1_3b": (24, {2: (12, 8, 16), 3: (8, 6, 10), 4: (6, 5, 7), 5: (5, 4, 6)}),
}
E2E_LENGTH, E2E_ANSWER = 160 - 38, 40  # longest sequence less the median prompt; a usual answer


def of_paper(model: str, times: int, length: int = E2E_LENGTH) -> LayerSchedule:
    values: dict[str, Any] = yaml.safe_load((CONF_DIR / "skip_schedule" / f"{model}_{times}x.yaml").read_text("utf-8"))
    config = SkipScheduleConfig(**{**values, "decay": Decay(values["decay"]), "side": Side(values["side"])})
    schedule = config.over(length)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("model", TABLE_2)
@pytest.mark.parametrize("times", [2, 3, 4, 5])
def test_table_2_of_the_paper(model: str, times: int) -> None:
    layers, rows = TABLE_2[model]
    average, least, most = rows[times]
    schedule = of_paper(model, times)
    assert (schedule.max_layers, schedule.min_layers, schedule.warmup_layers) == (most, least, 1)
    assert schedule.count(0) == most and schedule.count(E2E_LENGTH) == schedule.count(9999) == least
    assert schedule.mean_layers() == pytest.approx(average, abs=0.55)  # it rounds 16.5 to 16
    assert round(layers / schedule.mean_layers()) == times


@pytest.mark.parametrize(
    ("model", "times", "generated"),
    [("opt_1_3b", 2, 14.7), ("opt_1_3b", 3, 9.4), ("opt_1_3b", 4, 6.8), ("opt_1_3b", 5, 5.8), ("opt_6_7b", 2, 20.3),
     ("opt_6_7b", 3, 13.0), ("opt_6_7b", 4, 9.4), ("opt_6_7b", 5, 7.6)],
)  # fmt: skip
def test_table_4_says_that_counts_are_rounded_to_the_nearest(model: str, times: int, generated: float) -> None:
    """Its generated layers on E2E; cut off, 4x of OPT-1.3B would have 6.0, rounded up 7.0."""
    assert of_paper(model, times).mean_layers(E2E_ANSWER) == pytest.approx(generated, abs=0.15)


def test_the_papers_own_example() -> None:
    """Section 2.4: of 32 layers 12 run, one of them warm-up: layer 1, then 22 to 32."""
    assert LayerSchedule(12, 12, 10).layers(1, 32) == (1, *range(22, 33))
    assert LayerSchedule(12, 12, 10).layers(0, 32) == tuple(range(1, 33)), "the prompt runs them all"


def test_linear_counts_by_hand() -> None:
    schedule = LayerSchedule(6, 2, 8)  # 6, 5.5, 5, 4.5, ...
    assert [schedule.count(position) for position in range(10)] == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2]


def test_power_counts_by_hand() -> None:
    schedule = LayerSchedule(8, 2, 9, decay=Decay.power, power=1.0)  # 2 + 6 (1 / (1 + p) - .1) / .9
    assert [schedule.count(position) for position in range(10)] == [8, 5, 4, 3, 3, 2, 2, 2, 2, 2]
    steeper = LayerSchedule(8, 2, 9, decay=Decay.power, power=2.0)
    assert all(steeper.count(p) <= schedule.count(p) for p in range(10))


@pytest.mark.parametrize(
    ("warmup", "side", "layers"),
    [(0, Side.top, (6, 7, 8)), (1, Side.top, (1, 7, 8)), (2, Side.top, (1, 2, 8)), (3, Side.top, (1, 2, 3)),
     (0, Side.bottom, (1, 2, 3)), (2, Side.bottom, (1, 2, 3))],
)  # fmt: skip
def test_warm_up_at_the_bottom_and_the_rest_at_the_top(warmup: int, side: Side, layers: tuple[int, ...]) -> None:
    assert LayerSchedule(3, 3, 5, warmup, side=side).layers(2, 8) == layers


@given(
    st.integers(1, 12), st.integers(0, 11), st.integers(1, 40), st.integers(0, 3), st.sampled_from(Decay),
    st.floats(1e-300, 400.0), st.sampled_from(Side),
)  # fmt: skip
def test_no_later_token_runs_what_an_earlier_one_has_not(
    most: int, less: int, length: int, warmup: int, decay: Decay, power: float, side: Side
) -> None:
    least = max(1, most - less)
    schedule = LayerSchedule(most, least, length, min(warmup, least), decay, power, side)
    steps = [schedule.layers(step, 12) for step in range(length + 3)]
    check_monotone(steps)
    assert [len(each) for each in steps[1:]] == [schedule.count(position) for position in range(length + 2)]
    assert all(least <= len(each) <= most and len(set(each)) == len(each) for each in steps[1:])
    for layer, reach in enumerate(schedule.reach(length + 3, 12), start=1):
        assert [layer in each for each in steps] == [True] * reach + [False] * (length + 3 - reach)


def test_a_schedule_is_kept_as_plain_values() -> None:
    schedule = LayerSchedule(5, 3, 40, 0, Decay.power, 1.5, Side.bottom)
    assert LayerSchedule.from_json(schedule.to_json()) == schedule
    for wrong in ({}, {**schedule.to_json(), "decay": "cubic"}, {**schedule.to_json(), "more": 1}):
        with pytest.raises(ConfigError, match="no settings of a schedule"):
            LayerSchedule.from_json(wrong)


def test_one_clear_error_each() -> None:
    with pytest.raises(ConfigError, match="not monotone: it rises from max_layers=3 to min_layers=5"):
        LayerSchedule(3, 5, 10)
    with pytest.raises(ConfigError, match="max_layers=9 exceeds the model's 8 decoder layers; give at most 8"):
        LayerSchedule(9, 5, 10).layers(0, 8)
    with pytest.raises(ConfigError, match="warmup_layers=3 are more than min_layers=2"):
        LayerSchedule(4, 2, 10, 3)
    with pytest.raises(ConfigError, match=r"power must lie in \(0, inf\), got 0.0"):
        LayerSchedule(4, 2, 10, power=0.0)
    for wrong in ((4, 0, 10), (4, 2, 0), (4, 2, 10, -1)):
        with pytest.raises(ConfigError, match="at least"):
            LayerSchedule(*wrong)
    with pytest.raises(ConfigError, match=r"step 2 runs layers \[3\], which step 1 has not run"):
        check_monotone([(1, 2, 3), (1, 2), (1, 3)])


def test_settings_say_the_same_before_any_model_is_there() -> None:
    assert SkipScheduleConfig().over(8) is None
    assert SkipScheduleConfig(4).over(8) == LayerSchedule(4, 4, 8)
    with pytest.raises(ConfigError, match="not monotone"):
        SkipScheduleConfig(3, 5)
