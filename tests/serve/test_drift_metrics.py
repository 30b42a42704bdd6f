"""What an operator sees of drift: from the detectors over the engine's process to /metrics, and back down again."""

from collections.abc import Iterator
from math import exp, isfinite, log

import pytest
from prometheus_client.parser import text_string_to_metric_families

from calm.config import OnDrift
from serve.desk import Desk
from serve.drift import BETS, Drift, Reference, ShiftDetector, share_skipped
from serve.engine import Engine
from serve.frames import Frames, pack
from serve.http.metrics import NO_LOAD, Metrics
from serve.messages import Batch, DriftState, Load, Submit
from serve.options import RequestOptions
from serve.tokenising import Tokeniser

from .models import texts
from .test_drift import answers, artifact, mean_skip, served_answers, shares

PER_ALARM = 1_000.0


def scraped(load: Load) -> dict[str, float]:
    """The drift samples of a server whose engine stands there."""
    text = Metrics(lambda: load, lambda: None).exposition().decode()
    families = text_string_to_metric_families(text)
    return {each.name: each.value for family in families for each in family.samples if "drift" in each.name}


def test_the_state_is_that_of_all_certificates_and_falls_back_with_the_traffic() -> None:
    drift, certificate = Drift(OnDrift.conservative, PER_ALARM, patience=300), artifact()
    assert drift.state == DriftState(False, 0, 0.0)
    assert answers(drift, 0.6, 500) == 0
    calm = drift.state
    assert not calm.alarm and calm.alarms == 0 and 0 <= calm.log_evidence < log(2 * PER_ALARM)
    assert answers(drift, 0.35, 100) >= 1
    alarmed = drift.state
    assert alarmed.alarm and alarmed.alarms == drift.alarms[certificate.name]
    answers(drift, 0.6, 4_000, seed=9)
    after = drift.state
    assert not after.alarm and after.alarms >= alarmed.alarms and after.log_evidence < log(2 * PER_ALARM)


def test_evidence_grows_until_it_raises_the_alarm() -> None:
    drift, certificate = Drift(OnDrift.warn, PER_ALARM), artifact()
    asked, seen = certificate.grid[3], [0.0]
    for value in shares(0.4, 400, seed=1):
        alarmed = drift.saw(certificate, asked, asked, [round(8 * (1 - value))])
        seen.append(drift.state.log_evidence)
        if alarmed:
            break
    assert max(seen[:-1]) < log(2 * PER_ALARM) <= seen[-1]


def plain_capital(values: list[float], reference: Reference, low_side: bool) -> Iterator[float]:
    """Mean capital of the bets on one side, never capped."""
    low, high = reference.mean - reference.slack, reference.mean + reference.slack
    capital = [1.0] * len(BETS)
    for value in values:
        won = (low - value) / (1 - low + 1e-9) if low_side else (value - high) / high
        capital = [max(1.0, each) * (1 + bet * won) for each, bet in zip(capital, BETS, strict=True)]
        yield sum(capital) / len(BETS)


@pytest.mark.parametrize("mean", [0.3, 0.4, 0.45, 0.6, 0.7])
def test_the_cap_moves_no_alarm(mean: float) -> None:
    reference, limit = Reference(0.5, 0.15, 2_000), 2 * PER_ALARM
    for seed in range(10):
        values = shares(mean, 2_000, seed)
        detector = ShiftDetector(reference, PER_ALARM)
        found = next((i for i, value in enumerate(values) if detector.saw(value)), None)
        sides = zip(plain_capital(values, reference, True), plain_capital(values, reference, False), strict=True)
        assert found == next((i for i, both in enumerate(sides) if max(both) >= limit), None)


def test_evidence_stays_a_number_however_long_the_shift_lasts_and_is_soon_lost_after_it() -> None:
    """A detector that warns only is never reset: uncapped, its capital would leave a float's range."""
    detector = ShiftDetector(Reference(0.5, 0.15, 2_000), PER_ALARM)
    for value in [0.0] * 20_000:
        detector.saw(value)
    assert isfinite(detector.evidence) and detector.evidence >= 2 * PER_ALARM
    after = []
    for value in shares(0.5, 10_000):
        detector.saw(value)
        after.append(detector.evidence)
    assert after[1_000] < 2 * PER_ALARM and min(after) < 2 and detector.alarmed


def test_the_share_of_an_answer_is_over_its_tokens() -> None:
    assert share_skipped([4, 4], 4) == 0.0
    assert share_skipped([1, 2, 3], 4) == pytest.approx(0.5)


def test_metrics_tell_the_state_and_are_there_before_there_is_any() -> None:
    assert scraped(NO_LOAD) == {"calm_drift_alarm": 0, "calm_drift_alarms_total": 0, "calm_drift_evidence": 0}
    load = Load(0.0, 5, 0, 0, 0, 0, 0, 0, 0, DriftState(True, 3, 12.5))
    assert scraped(load) == {"calm_drift_alarm": 1, "calm_drift_alarms_total": 3, "calm_drift_evidence": 12.5}


def attended(engine: Engine, rounds: int) -> Load:
    """Where the engine says that it stands after certified requests, as it arrives in the server's process."""
    tokeniser = Tokeniser(engine.model.to_ids)
    desk, batch = Desk(engine, tokeniser), None
    try:
        for turn in range(rounds):
            for number, text in enumerate(texts(4)):
                desk.take(Submit(f"{turn}-{number}", text, RequestOptions(tolerance=0.1), 0.0))
            while desk.busy:
                desk.step()
                batch = desk.batch()
    finally:
        tokeniser.close()
    (arrived,) = Frames().feed(pack(batch))
    assert isinstance(arrived, Batch)
    return arrived.load


@pytest.mark.parametrize("on_drift", [OnDrift.warn, OnDrift.full], ids=lambda action: action.value)
def test_an_engines_alarm_arrives_at_the_server(on_drift: OnDrift) -> None:
    usual = mean_skip(served_answers(OnDrift.warn, 0.5, 4)[1])
    far = usual - 0.4 if usual > 0.5 else usual + 0.4
    calm = scraped(attended(served_answers(on_drift, usual, 0)[0], 25))
    assert calm["calm_drift_alarm"] == calm["calm_drift_alarms_total"] == 0
    assert calm["calm_drift_evidence"] < log(2 * 20)
    engine, _ = served_answers(on_drift, far, 0)
    told = scraped(attended(engine, 50))
    assert told["calm_drift_alarm"] == told["calm_drift_alarms_total"] == 1
    state = engine.drift.state
    assert told["calm_drift_evidence"] == pytest.approx(state.log_evidence)
    if on_drift is OnDrift.warn:
        assert exp(state.log_evidence) >= 2 * 20
