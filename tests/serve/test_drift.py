"""Drift: silent on traffic like the calibration's, an alarm soon after it changes, and what each action does then."""

from dataclasses import replace

import numpy as np
import pytest

from calm.calibration.artifact import Artifact
from calm.config import OnDrift
from serve.drift import Drift, Reference, ShiftDetector
from serve.engine import Engine
from serve.requests import Answer

from .models import texts
from .test_certified import artifact as plain_artifact
from .test_certified import certified_model

LAYERS = 8
MEAN, DEVIATION = 0.5, 0.15
REFERENCE = Reference(MEAN, DEVIATION, 2_000)


def shares(mean: float, count: int, seed: int = 0, deviation: float = DEVIATION) -> list[float]:
    """Of layers skipped by answers: a beta distribution of this mean and deviation."""
    spread = mean * (1 - mean) / deviation**2 - 1
    draw = np.random.default_rng(seed)
    return [float(value) for value in draw.beta(mean * spread, (1 - mean) * spread, count)]


def first_alarm(detector: ShiftDetector, values: list[float]) -> int | None:
    return next((i for i, value in enumerate(values) if detector.saw(value)), None)


def test_traffic_like_the_calibrations_raises_no_alarm() -> None:
    for seed in range(5):
        detector = ShiftDetector(REFERENCE, 100_000)
        assert first_alarm(detector, shares(MEAN, 8_000, seed)) is None and not detector.alarmed
        assert detector.evidence >= 1.0


@pytest.mark.parametrize("side", [+1, -1], ids=["more", "less"])
def test_at_the_edge_of_what_means_nothing_false_alarms_are_as_rare_as_promised(side: int) -> None:
    promised, seen, alarms = 400, 60_000, 0
    detector = ShiftDetector(REFERENCE, promised)
    for value in shares(MEAN + side * REFERENCE.slack, seen, seed=3, deviation=0.3):
        if detector.saw(value):
            alarms += 1
            detector.reset()
    assert alarms <= 1.3 * seen / promised


@pytest.mark.parametrize("mean", [0.4, 0.62])
@pytest.mark.parametrize("before", [0, 20_000], ids=["at-once", "late"])
def test_a_change_is_seen_soon_however_late_it_comes(mean: float, before: int) -> None:
    detector = ShiftDetector(REFERENCE, 100_000)
    assert first_alarm(detector, shares(MEAN, before)) is None
    found = first_alarm(detector, shares(mean, 2_000, seed=1))
    assert found is not None and found < 500 and detector.alarmed


def test_a_detector_that_only_looks_at_the_sum_of_all_would_miss_a_late_change() -> None:
    """The control: without starting anew, the capital lost before the change has to be won back."""
    detector = ShiftDetector(REFERENCE, 100_000)
    lost = 1.0
    for value in [*shares(MEAN, 20_000), *shares(0.62, 500, seed=1)]:
        lost *= 1.0 + 0.2 * (value - detector._high) / detector._high
    assert lost < 1.0


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_means_at_the_ends_are_watched_from_the_other_side(mean: float) -> None:
    detector = ShiftDetector(Reference(mean, 0.0, 100), 1_000)
    assert first_alarm(detector, [mean] * 1_000) is None
    assert first_alarm(detector, [0.5] * 1_000) is not None


def artifact() -> Artifact:
    """Grid 1, .9, .5, .3, of which answers skip 0, 30, 50 and 60 %."""
    plain = plain_artifact()
    skips = ((0.0, 0.0), (0.3, 0.1), (0.5, 0.15), (0.6, 0.15))
    identity = replace(plain.identity, num_layers=LAYERS)
    return replace(plain, article_skips=skips, identity=identity, n=2_000)


def answers(drift: Drift, mean: float, count: int, seed: int = 0) -> int:
    """Requests that ask for the boldest threshold; those at safer ones skip less. Returns the alarms."""
    certificate, alarms = artifact(), 0
    asked = certificate.grid[3]
    for value in shares(mean, count, seed):
        used = drift.threshold(certificate, asked)
        scale = {0: 0.0, 1: 0.5, 2: 0.83, 3: 1.0}[certificate.grid.index(used)]
        depth = LAYERS * (1 - value * scale)
        low = int(depth)
        layers = [low + (i < round(100 * (depth - low))) for i in range(100)]  # tokens of this mean depth
        alarms += drift.saw(certificate, asked, used, layers)
    return alarms


def test_a_warning_changes_nothing() -> None:
    drift, certificate = Drift(OnDrift.warn), artifact()
    assert answers(drift, 0.6, 2_000) == 0
    before = drift.told(certificate, certificate.grid[3])
    assert not before.drifted and before.now == pytest.approx(0.6, abs=0.05) and before.calibrated == 0.6
    assert answers(drift, 0.4, 1_000) == 1  # told once
    after = drift.told(certificate, certificate.grid[3])
    assert after.drifted and after.steps_back == 0 and after.alarms == 1 and after.now == pytest.approx(0.4, abs=0.05)
    assert drift.threshold(certificate, certificate.grid[3]) == certificate.grid[3]


def test_conservative_goes_back_step_by_step_to_full_depth_and_returns_with_the_traffic() -> None:
    drift, certificate = Drift(OnDrift.conservative, patience=400), artifact()
    asked = certificate.grid[3]
    seen = set()
    for seed in range(40):
        answers(drift, 0.35, 20, seed)
        seen.add(certificate.grid.index(drift.threshold(certificate, asked)))
    assert seen == {3, 2, 1, 0}
    assert drift.told(certificate, asked).drifted
    answers(drift, 0.6, 4_000, seed=9)
    assert drift.threshold(certificate, asked) == asked and not drift.told(certificate, asked).drifted


def test_full_goes_to_full_depth_at_once_and_tries_again_later() -> None:
    drift, certificate = Drift(OnDrift.full, patience=300), artifact()
    asked = certificate.grid[3]
    assert answers(drift, 0.35, 250) == 1
    assert drift.threshold(certificate, asked) == 1.0 and drift.told(certificate, asked).steps_back == -1
    answers(drift, 0.6, 300, seed=2)
    assert drift.threshold(certificate, asked) == asked


def test_what_is_of_no_certificate_is_not_counted() -> None:
    drift, certificate = Drift(OnDrift.full), artifact()
    for used in (0.123, certificate.grid[3]):
        assert not drift.saw(certificate, 0.123, used, [1, 2])
    assert not drift.saw(certificate, certificate.grid[3], certificate.grid[3], [])
    told = drift.told(certificate, certificate.grid[3])
    assert told.now is None and not told.drifted and told.alarms == 0


def served_answers(on_drift: OnDrift, reference: float, count: int) -> tuple[Engine, list[Answer]]:
    """Answers at tolerance 0.1 of an engine whose certificate recorded this share of layers skipped by an answer."""
    plain = plain_artifact()
    certificate = replace(plain, article_skips=((0.0, 0.0), (reference / 2, 0.1), (reference, 0.1), (reference, 0.1)))
    model = replace(certified_model(), artifacts=(certificate,))
    engine = Engine(model, max_batch=4, on_drift=on_drift, requests_per_alarm=20, drift_patience=10_000)
    answers = [engine.generate(texts(4), tolerance=0.1) for _ in range(count // 4)]
    return engine, [each for batch in answers for each in batch]


def mean_skip(answers: list[Answer]) -> float:
    shares = [1 - sum(each.emission_layers) / len(each.emission_layers) / 4 for each in answers]
    return sum(shares) / len(shares)


def test_an_engine_falls_back_to_full_depth_and_stays_certified(caplog: pytest.LogCaptureFixture) -> None:
    usual = mean_skip(served_answers(OnDrift.warn, 0.5, 4)[1])
    assert 0.02 < usual < 0.9
    far = usual - 0.4 if usual > 0.5 else usual + 0.4
    engine, answers = served_answers(OnDrift.full, far, 200)
    assert all(answer.certified for answer in answers)
    assert mean_skip(answers[:4]) == usual and mean_skip(answers[-4:]) == 0.0
    assert engine.drift.alarms == {"softmax-risk": 1}
    assert "no longer as deep as at calibration" in caplog.text and "on_drift=full" in caplog.text
    warned, answers = served_answers(OnDrift.warn, far, 200)
    assert mean_skip(answers[-4:]) == usual and warned.drift.alarms == {"softmax-risk": 1}
    quiet, answers = served_answers(OnDrift.full, usual, 200)
    assert mean_skip(answers[-4:]) == usual and not quiet.drift.alarms


def test_an_alarm_is_also_for_those_who_wait_by_then() -> None:
    """All of them are queued before the first one runs."""
    plain = plain_artifact()
    certificate = replace(plain, article_skips=((0.0, 0.0), *[(0.95, 0.01)] * 3))
    model = replace(certified_model(), artifacts=(certificate,))
    engine = Engine(model, max_batch=2, on_drift=OnDrift.full, requests_per_alarm=20, drift_patience=10_000)
    answers = engine.generate(texts(4) * 40, tolerance=0.1)
    depths = [set(answer.emission_layers) for answer in answers]
    first = depths.index({4})
    assert engine.drift.alarms == {"softmax-risk": 1} and 0 < first < 80
    assert all(each == {4} for each in depths[first + 2 :]) and all(answer.certified for answer in answers)


def test_only_certified_tolerances_are_watched() -> None:
    usual = mean_skip(served_answers(OnDrift.warn, 0.5, 4)[1])
    engine, _ = served_answers(OnDrift.full, usual, 4)
    for options in ({"threshold": 0.5}, {"tolerance": 0.01}, {"tolerance": 0.1, "max_tokens": 2}, {}):
        before = engine.drift.told(engine.model.artifacts[0], 0.5).now
        for _ in range(5):
            engine.generate(texts(4), **options)
        assert engine.drift.told(engine.model.artifacts[0], 0.5).now == before and not engine.drift.alarms
