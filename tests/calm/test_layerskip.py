"""The curves of arXiv 2404.16710, equation by equation, and what they make of a step's exit losses."""

import math
from collections import Counter

import pytest

from calm.config import ExitLoss, FinetuneConfig
from calm.errors import ConfigError
from calm.finetune_config import Curriculum, ExitCurriculumConfig, LayerDropoutConfig, OverTime
from calm.layerskip import drop_rates, exit_weights, exits_at
from calm.losses import layer_weights, step_layers

GRADUAL = ExitCurriculumConfig(Curriculum.gradual)


def rotating(every: int) -> ExitCurriculumConfig:
    return ExitCurriculumConfig(Curriculum.rotational, every)


def test_layer_dropout_rises_exponentially_with_depth() -> None:
    rates = drop_rates(LayerDropoutConfig(0.2), 5, step=0, steps=10)
    assert rates == pytest.approx([0.2 * (2 ** (layer / 4) - 1) for layer in range(5)])  # equation 3
    assert rates[0] == 0.0 and rates[-1] == pytest.approx(0.2)
    assert drop_rates(LayerDropoutConfig(0.2), 1, 0, 10) == [0.0]
    assert drop_rates(LayerDropoutConfig(0.2), 5, 9, 10) == rates  # S(t) = 1


def test_layer_dropout_rises_exponentially_over_time_where_that_is_asked_for() -> None:
    config = LayerDropoutConfig(0.4, OverTime.exponential)
    last = [drop_rates(config, 3, step, 9)[-1] for step in range(9)]
    assert last == pytest.approx([0.4 * math.expm1(step * math.log(2) / 8) for step in range(9)])  # equation 4
    assert last[0] == 0.0 and last[-1] == pytest.approx(0.4)
    assert drop_rates(config, 3, 20, 9)[-1] == pytest.approx(0.4)  # a run that was made longer


def test_exit_weights_are_quadratic_and_the_last_layer_has_its_own() -> None:
    assert exit_weights(5, 1.0) == [0, 1, 3, 6, 4 + 6]  # equation 7
    assert exit_weights(5, 0.5) == [0, 0.5, 1.5, 3, 4 + 3]
    assert exit_weights(5, 0.0) == [0, 0, 0, 0, 4] and exit_weights(1, 1.0) == [1]
    assert layer_weights(ExitLoss.layerskip, 5, 1.0) == pytest.approx([0, 0.05, 0.15, 0.3, 0.5])  # equation 6
    config = FinetuneConfig(loss=ExitLoss.layerskip, exit_scale=1.0)
    assert step_layers(config, 5, 0, 0) == pytest.approx({2: 0.05, 3: 0.15, 4: 0.3, 5: 0.5})


def test_the_rotational_curriculum_asks_every_exit_once_in_r_steps_and_the_last_layer_always() -> None:
    layers = [2, 4, 6, 8, 9]
    assert [exits_at(rotating(3), layers, step, 100) for step in range(3)] == [[2, 8, 9], [4, 9], [6, 9]]
    assert [exits_at(rotating(3), layers, step, 100) for step in (3, 7)] == [[2, 8, 9], [4, 9]]
    asked = Counter(layer for step in range(6) for layer in exits_at(rotating(2), list(range(1, 7)), step, 100))
    assert asked == {1: 3, 2: 3, 3: 3, 4: 3, 5: 3, 6: 6}
    assert exits_at(rotating(1), layers, 5, 100) == layers


def test_the_gradual_curriculum_goes_down_from_the_last_layer_and_has_all_of_them_at_half_time() -> None:
    layers = [1, 2, 3, 4]
    asked = [exits_at(GRADUAL, layers, step, 80) for step in range(80)]
    assert [len(now) for now in asked[:40:10]] == [1, 2, 3, 4]  # one more in T / 2L = 10 steps
    assert asked[9] == [4] and asked[10] == [3, 4] and asked[29] == [2, 3, 4]
    assert all(now == layers for now in asked[30:])


def test_a_step_shares_the_weight_among_the_exits_that_it_asks() -> None:
    config = FinetuneConfig(steps=80, exit_curriculum=GRADUAL)
    assert step_layers(config, 4, 0, 0) == {4: 1.0}
    assert step_layers(config, 4, 10, 0) == pytest.approx({3: 3 / 7, 4: 4 / 7})
    assert step_layers(config, 4, 79, 0) == pytest.approx(step_layers(FinetuneConfig(), 4, 0, 0))
    few = FinetuneConfig(exits_only=True, loss=ExitLoss.uniform)
    assert step_layers(few, 9, 5, 0, [2, 6]) == pytest.approx({2: 1 / 3, 6: 1 / 3, 9: 1 / 3})
    few = FinetuneConfig(exits_only=True, loss=ExitLoss.uniform, exit_curriculum=rotating(2))
    assert [list(step_layers(few, 9, step, 0, [2, 6])) for step in (0, 1)] == [[2, 9], [6, 9]]
    drawn = FinetuneConfig(exits_only=True, rotate=1)
    assert {tuple(step_layers(drawn, 9, step, 0, [2, 6, 7])) for step in range(20)} == {(2, 9), (6, 9), (7, 9)}


def test_what_is_out_of_range_is_refused_in_one_line() -> None:
    for rate in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"finetune.layer_dropout.p_max must lie in \[0, 1\), got"):
            LayerDropoutConfig(rate)
    with pytest.raises(ConfigError, match="finetune.exit_curriculum.every must be at least 1, got 0"):
        rotating(0)
    with pytest.raises(ConfigError, match="both choose the layers of a step; give one of them"):
        FinetuneConfig(rotate=2, exit_curriculum=GRADUAL)
