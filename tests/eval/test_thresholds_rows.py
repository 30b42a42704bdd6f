"""Numbers of threshold curves: against plain loops, and certificates against calm.calibration."""

import math

import numpy as np
import pytest

from calm.calibration import certified_points, hoeffding_bentkus
from calm.config import Head, Measure
from calm.experiment_config import ThresholdsConfig
from eval.thresholds_decode import curves
from eval.thresholds_rows import Answers, between, certified_index, differences, rows_of, splits

from .threshold_points import DECAYING, LAYERS, SOFTMAX, STATE, THIN, config_of, made_up


def test_curves_are_each_once_and_other_heads_are_of_the_first_that_reads_one() -> None:
    asked = ThresholdsConfig(heads=[Head.full, Head.candidates])
    found = curves(asked, [Measure.state, Measure.softmax])
    assert found == [STATE, SOFTMAX, DECAYING, THIN]
    assert curves(asked, [Measure.state]) == [STATE]


def test_the_certified_point_is_that_of_calibration() -> None:
    generator = np.random.default_rng(3)
    for _ in range(30):
        means = np.concatenate([[0.0], np.sort(generator.uniform(0, 0.1, 6))])
        n, tolerance = int(generator.integers(20, 600)), float(generator.choice([0.05, 0.08]))
        tested = [0.0, *(float(hoeffding_bentkus(mean, n, tolerance)) for mean in means[1:])]
        points = certified_points(list(range(len(means))), tested, 0.05)
        assert certified_index(means, n, tolerance, 0.05) == points[-1]
    late = np.array([0.0, 0.09, 0.0])  # what comes after a failure is not certified
    assert certified_index(late, 10_000, 0.05, 0.05) == 0


def test_layers_skipped_is_over_tokens_and_a_difference_is_of_the_same_articles() -> None:
    measured = made_up({SOFTMAX: [0.01, 0.02, 0.6], STATE: [0.02, 0.5, 0.6]})
    rows = rows_of(measured)
    test = slice(200, None)
    for row in (each for each in rows if each["kind"] == "curve" and each["measure"] == "softmax"):
        point = measured.curves[SOFTMAX][row["index"]]
        by_hand = sum(map(int, point.layers[test])) / sum(map(int, point.tokens[test]))
        assert row["layers_skipped"] == pytest.approx(1 - by_hand / LAYERS)
        assert row["rouge_l"] == pytest.approx(float(np.mean(point.rouge_l[test])))
        lost = [max(0.0, a - b) for a, b in zip(measured.full.rouge_l[test], point.rouge_l[test], strict=True)]
        assert row["loss"] == pytest.approx(sum(lost) / 200) and row["loss_low"] <= row["loss"] <= row["loss_high"]
    certified = {(row["measure"], row["tolerance"]): row for row in rows if row["kind"] == "certified"}
    assert certified["softmax", 0.2]["index"] == 2 and certified["state", 0.2]["index"] == 1
    pair = next(row for row in differences(measured) if row["of"] == "measure" and row["tolerance"] == 0.2)
    assert (pair["measure"], pair["other_measure"]) == ("softmax", "state")
    assert pair["layers_skipped"] == pytest.approx(1 / LAYERS)
    a, b = measured.curves[SOFTMAX][2].rouge_l[test], measured.curves[STATE][1].rouge_l[test]
    assert pair["rouge_l"] == pytest.approx(float((a - b).mean()))


def test_the_interval_of_layers_skipped_is_that_of_articles_drawn_anew_with_their_tokens() -> None:
    generator = np.random.default_rng(1)
    tokens = generator.integers(2, 20, 300)
    layers = np.array([generator.integers(1, LAYERS + 1, count).sum() for count in tokens])
    measured = made_up({SOFTMAX: [0.1]}, config=config_of(bootstrap=800))
    found = measured.intervals("x", Answers(1.0, tokens / 20, layers, tokens).skipped(LAYERS))
    drawn = [generator.integers(0, 300, 300) for _ in range(2000)]
    ends = np.quantile([1 - layers[each].sum() / tokens[each].sum() / LAYERS for each in drawn], [0.025, 0.975])
    assert [found["x_low"], found["x_high"]] == pytest.approx(list(ends), abs=0.004)


def test_static_depths_are_mixed_to_the_mean_depth() -> None:
    measured = made_up({SOFTMAX: [0.1]})
    tokens = measured.full.tokens[200:]
    point = Answers(0.5, measured.full.rouge_l[200:], 2 * tokens, tokens)
    mixed = between(measured, point)
    assert mixed is not None and mixed == pytest.approx(measured.static[2].rouge_l[200:])
    half = Answers(0.5, point.rouge_l, np.array(2.5 * tokens), tokens)
    mixed = between(measured, half)
    expected = (measured.static[2].rouge_l[200:] + measured.static[3].rouge_l[200:]) / 2
    assert mixed is not None and mixed == pytest.approx(expected)
    assert between(measured, measured.tested(measured.full)) is None
    del measured.static[3]
    assert between(measured, half) is None  # a static depth that failed


def test_random_halves_against_a_loop() -> None:
    config = config_of(splits=7, tolerances=[0.05])
    measured = made_up({SOFTMAX: [0.02, 0.035, 0.2]}, articles=301, config=config)
    (found,) = splits(measured)
    generator, held, below, losses = np.random.default_rng([0, 1]), 0, 0, []
    for _ in range(7):
        order = [int(each) for each in generator.permutation(301)]
        lost = [
            [max(0.0, float(measured.full.rouge_l[i] - point.rouge_l[i])) for i in order]
            for point in measured.curves[SOFTMAX]
        ]
        at = 0
        while at + 1 < 4 and hoeffding_bentkus(math.fsum(lost[at + 1][:150]) / 150, 150, 0.05) <= 0.05:
            at += 1
        losses.append(math.fsum(lost[at][150:]) / 151)
        held, below = held + (losses[-1] <= 0.05), below + (at > 0)
    assert (found["held"], found["below_one"], found["splits"]) == (held, below, 7)
    assert found["loss"] == pytest.approx(np.mean(losses)) and found["worst_loss"] == pytest.approx(max(losses))
    few = made_up({SOFTMAX: [0.0]}, articles=20, config=config)
    assert [(row["held"], row["below_one"]) for row in splits(few)] == [(7, 0)]  # nothing can be certified of ten
