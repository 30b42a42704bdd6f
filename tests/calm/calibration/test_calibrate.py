"""The whole calibration, on a decoder that is a hash: order of events, resuming, refusals, and what is certified."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calm.calibration import Artifact, ModelIdentity, hash_rows, needed_n
from calm.calibration.calibrate import calibrate
from calm.calibration.consistency import ConsistencyLoss
from calm.calibration.grid import check_grid
from calm.calibration.pvalues import hoeffding_bentkus
from calm.calibration.testing import certified_points
from calm.config import CalibrationConfig, Consistency, Measure, Schedule
from calm.errors import CalibrationError
from calm.policies import Confident, Full, Policy
from calm.records import Example

from .fake_decoder import IDENTITY, FakeDecoder, make_examples

DEV = make_examples(40, "dev")
ROWS = make_examples(160, "cal")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and a busy disk takes its time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def config(**changes: object) -> CalibrationConfig:
    values: dict[str, object] = dict(
        measures=[Measure.softmax], tolerances=[0.1], error_prob=0.1, batch_size=64, schedule=Schedule.constant
    )
    return CalibrationConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(
    folder: Path,
    settings: CalibrationConfig | None = None,
    decode: FakeDecoder | None = None,
    rows: Sequence[Example] = ROWS,
    identity: ModelIdentity = IDENTITY,
) -> list[Artifact]:
    return calibrate(decode or FakeDecoder(), DEV, rows, settings or config(), identity, folder)


def test_certified_set_follows_from_a_fresh_decode(tmp_path: Path) -> None:
    (artifact,) = run(tmp_path)
    certificate = artifact.certificate(0.1)
    assert certificate.certified_below_one
    assert certificate.picked
    assert len(artifact.grid) == 21
    loss = ConsistencyLoss(Consistency.risk, ROWS, FakeDecoder()(ROWS, Full()))
    p_values = [0.0]
    for threshold, mean_loss in zip(artifact.grid[1:], artifact.mean_losses[1:], strict=False):
        losses = loss(FakeDecoder()(ROWS, artifact.policy(threshold)))
        assert losses.mean() == mean_loss
        p_values.append(float(hoeffding_bentkus(losses.mean(), 160, 0.1)))
    assert list(certificate.p_values) == p_values
    assert list(certificate.certified) == certified_points(artifact.grid, p_values, 0.1)
    assert certificate.threshold == certificate.certified[-1] == artifact.threshold_for(0.1, Consistency.risk)
    assert artifact.n == 160
    assert artifact.calibration_rows == hash_rows(ROWS)


def test_decoding_stops_after_the_first_failure_unless_the_curve_is_asked_for(tmp_path: Path) -> None:
    (stopped,) = run(tmp_path / "stopped", config(tolerances=[0.05]))
    certificate = stopped.certificate(0.05)
    assert len(certificate.p_values) == len(certificate.certified) + 1 < len(stopped.grid)
    assert certificate.p_values[-1] > stopped.test_level
    assert not stopped.complete
    (whole,) = run(tmp_path / "whole", config(tolerances=[0.05], complete=True))
    assert whole.complete
    assert len(whole.mean_losses) == len(whole.grid) == len(whole.certificate(0.05).p_values)
    assert whole.certificate(0.05).certified == certificate.certified
    assert whole.mean_losses[: len(stopped.mean_losses)] == stopped.mean_losses


def test_several_tolerances_each_end_their_own_sequence(tmp_path: Path) -> None:
    (both,) = run(tmp_path / "both", config(tolerances=[0.05, 0.15]))
    alone = [run(tmp_path / str(t), config(tolerances=[t]))[0].certificate(t) for t in (0.05, 0.15)]
    assert [c.certified for c in both.certificates] == [c.certified for c in alone]
    assert len(both.certificate(0.05).certified) < len(both.certificate(0.15).certified)
    assert both.test_level == 0.1  # tolerances hold one at a time: they do not share error_prob


def test_measures_share_error_prob_and_one_is_picked_on_dev(tmp_path: Path) -> None:
    measures = [Measure.state, Measure.softmax, Measure.classifier]
    artifacts = run(tmp_path, config(measures=measures))
    assert [artifact.measure for artifact in artifacts] == measures
    for artifact in artifacts:
        assert artifact.test_level == pytest.approx(0.1 / 3)
        certificate = artifact.certificate(0.1)
        assert list(certificate.certified) == certified_points(artifact.grid, certificate.p_values, 0.1 / 3)
        assert Artifact.load(tmp_path / f"{artifact.measure.value}-risk.json") == artifact
    dev_skips = [artifact.certificate(0.1).dev["layers_skipped"] for artifact in artifacts]
    picked = [artifact.certificate(0.1).picked for artifact in artifacts]
    assert sum(picked) == 1
    assert dev_skips[picked.index(True)] == max(dev_skips) > 0


def test_plans_are_on_disk_before_any_calibration_row_is_decoded(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    def watch(examples: Sequence[Example], policy: Policy) -> None:
        if examples[0].id.startswith("cal"):
            stored = [tmp_path / "work" / f"plan-{name}-risk.json" for name in ("softmax", "state")]
            seen.append({path.name: json.loads(path.read_text())["plan"]["grid"] for path in stored})

    artifacts = run(tmp_path, config(measures=[Measure.softmax, Measure.state]), FakeDecoder(watch=watch))
    assert seen
    for artifact in artifacts:
        check_grid(artifact.grid)
        assert seen[0][f"plan-{artifact.name}.json"] == list(artifact.grid)


def test_dev_rows_and_calibration_rows_never_meet(tmp_path: Path) -> None:
    decoder = FakeDecoder()
    run(tmp_path, decode=decoder)
    kinds = [{name.split("-")[0] for name in ids} for ids, _ in decoder.calls]
    assert all(len(kind) == 1 for kind in kinds)
    first_cal = kinds.index({"cal"})
    assert {"dev"} not in kinds[first_cal:]


@pytest.mark.parametrize("stop_after", [0, 1, 3, 5, 8, 11])
def test_an_interrupted_calibration_goes_on_to_bitwise_the_same_artifact(tmp_path: Path, stop_after: int) -> None:
    settings = config(batch_size=8)  # chunks of 64 rows
    whole = FakeDecoder()
    run(tmp_path / "whole", settings, whole)
    assert len(whole.calls) > stop_after
    broken, resumed = FakeDecoder(stop_after=stop_after), FakeDecoder()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", settings, broken)
    assert not (tmp_path / "broken" / "softmax-risk.json").exists()
    run(tmp_path / "broken", settings, resumed)
    name = "softmax-risk.json"
    assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert broken.calls + resumed.calls == whole.calls  # no chunk twice, none left out
    again = FakeDecoder()
    run(tmp_path / "broken", settings, again)
    assert again.calls == []


def test_another_model_rejects_cache_and_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeDecoder(), FakeDecoder(skill=0.9)
    run(tmp_path, decode=first)
    (artifact,) = run(tmp_path, decode=second, identity=replace(IDENTITY, model="f" * 64))
    assert "decoded with another model: rejected" in caplog.text
    (fresh,) = run(tmp_path / "fresh", decode=FakeDecoder(skill=0.9), identity=replace(IDENTITY, model="f" * 64))
    assert artifact == fresh
    with pytest.raises(CalibrationError, match="model: "):
        artifact.check_against(IDENTITY)


def test_traces_of_another_kind_of_device_are_not_mixed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (artifact,) = run(tmp_path)
    decoder = FakeDecoder()
    (again,) = calibrate(decoder, DEV, ROWS, config(), IDENTITY, tmp_path, device="cuda")
    assert "decoded with another device: rejected" in caplog.text
    assert len(decoder.calls) > 1
    assert again == artifact  # a certificate holds wherever it was made


def test_more_rows_reuse_the_grid_of_no_other_n(tmp_path: Path) -> None:
    run(tmp_path, rows=ROWS[:120])
    (artifact,) = run(tmp_path)
    (fresh,) = run(tmp_path / "fresh")
    assert artifact == fresh


def test_too_few_rows_are_said_with_the_number_needed_and_nothing_is_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = FakeDecoder()
    settings = config(measures=[Measure.softmax, Measure.state])
    needed = needed_n(0.1, 0.05)
    artifacts = run(tmp_path, settings, decoder, rows=ROWS[: needed - 1])
    assert f"{needed - 1} calibration rows certify nothing at tolerance 0.1" in caplog.text
    assert f"even without any loss {needed} rows are needed" in caplog.text
    assert decoder.calls == []
    for artifact in artifacts:
        certificate = artifact.certificate(0.1)
        assert (certificate.threshold, certificate.certified_below_one) == (1.0, False)
        assert certificate.needed_n == needed
        assert Artifact.load(tmp_path / f"{artifact.name}.json") == artifact
    assert [artifact.certificate(0.1).picked for artifact in artifacts] == [True, False]


def test_one_tolerance_out_of_reach_leaves_the_other_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (artifact,) = run(tmp_path, config(tolerances=[0.005, 0.1]))
    assert "certify nothing at tolerance 0.005" in caplog.text
    assert artifact.threshold_for(0.005) == 1.0
    assert artifact.certificate(0.1).certified_below_one


@pytest.mark.parametrize("n", [0, 1])
def test_no_row_is_an_error_and_one_row_certifies_nothing(tmp_path: Path, n: int) -> None:
    if n == 0:
        with pytest.raises(CalibrationError, match="calibration split has no rows"):
            run(tmp_path, rows=[])
        with pytest.raises(CalibrationError, match="dev split has no rows"):
            calibrate(FakeDecoder(), [], ROWS, config(), IDENTITY, tmp_path)
    else:
        (artifact,) = run(tmp_path, rows=ROWS[:1])
        assert artifact.threshold_for(0.1) == 1.0


def test_fewer_rows_than_asked_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (artifact,) = run(tmp_path, config(n=5000))
    assert artifact.n == 160
    assert "calibration.n=5000 was asked, the corpus has 160" in caplog.text
    (fewer,) = run(tmp_path / "fewer", config(n=100))
    assert fewer.n == 100


def test_a_model_whose_early_layers_are_wrong_is_certified_at_full_depth_only(tmp_path: Path) -> None:
    (artifact,) = run(tmp_path, decode=FakeDecoder(skill=0.0))
    certificate = artifact.certificate(0.1)
    assert (certificate.threshold, certificate.certified_below_one, certificate.picked) == (1.0, False, True)
    assert certificate.certified == (1.0,)
    assert len(certificate.p_values) == 2  # the first failure ended it
    assert certificate.dev["layers_skipped"] == 0.0


def test_losses_that_are_always_zero_certify_the_grid_and_nothing_beyond(tmp_path: Path) -> None:
    perfect = FakeDecoder(skill=1e9)
    (artifact,) = run(tmp_path, decode=perfect)
    assert set(artifact.mean_losses) == {0.0}
    assert artifact.threshold_for(0.1) == artifact.grid[-1] > 0.0
    assert artifact.certificate(0.1).p_values[-1] == pytest.approx(0.9**160)


def score_by(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Let every pair of texts score ``value``."""

    def score(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
        return np.full(len(predictions), value)

    monkeypatch.setattr("calm.calibration.consistency.rouge_l_many", score)


def test_losses_that_are_always_one_certify_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score_by(monkeypatch, 0.0)
    (artifact,) = run(tmp_path, config(consistency=Consistency.textual), FakeDecoder(skill=0.0))
    assert artifact.threshold_for(0.1) == 1.0
    assert len(artifact.certificate(0.1).p_values) == 2


@pytest.mark.parametrize("bad", [float("nan"), 1.5, -0.5])
@pytest.mark.parametrize("kind", list(Consistency))
def test_losses_that_are_none_end_the_calibration(
    tmp_path: Path, bad: float, kind: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_by(monkeypatch, bad)
    with pytest.raises(CalibrationError, match=r"a loss must lie in \[0, 1\]"):
        run(tmp_path, config(consistency=kind), FakeDecoder(skill=0.0))
    assert not list(tmp_path.glob("*.json"))


def test_constant_confidences_make_a_grid_of_one(tmp_path: Path) -> None:
    (artifact,) = run(tmp_path, decode=FakeDecoder(certainty=0.5))
    assert artifact.grid == (1.0, 0.5)
    (saturated,) = run(tmp_path / "saturated", decode=FakeDecoder(certainty=1.0))
    assert len(saturated.grid) == 2
    assert 0.99999 < float(saturated.grid[1]) < 1.0  # type: ignore[arg-type]


def shared(name: str) -> list[Example]:
    changes = {"family": {"family": DEV[3].family}, "source text": {"source": DEV[3].source}}[name]
    return [*ROWS[:-1], replace(ROWS[-1], **changes)]


SHARED = {
    "family": r"1 families and 0 source texts lie in more than one split, such as family '.*' \(calibration, {}\)",
    "source text": r"0 families and 1 source texts lie in more than one split, such as source '.*' \(calibration, {}\)",
}


@pytest.mark.parametrize("kind", SHARED)
def test_rows_shared_with_dev_or_training_are_refused_before_decoding(tmp_path: Path, kind: str) -> None:
    decoder = FakeDecoder()
    with pytest.raises(CalibrationError, match=SHARED[kind].format("dev")):
        run(tmp_path, decode=decoder, rows=shared(kind))
    changed = [replace(ROWS[5], id="t", family="other")] if kind == "source text" else [replace(ROWS[5], source="new")]
    with pytest.raises(CalibrationError, match=SHARED[kind].format("train")):
        calibrate(decoder, DEV, ROWS, config(), IDENTITY, tmp_path, others={"train": changed})
    assert decoder.calls == []


def test_two_rows_of_a_family_are_refused_and_repeated_ids_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CalibrationError, match="1 families have more than one calibration row, such as 'family-cal-0'"):
        run(tmp_path, rows=[*ROWS, replace(ROWS[0], id="new", source="new")])
    rows = [*ROWS[:99], replace(ROWS[0], family="new", source="new")]
    run(tmp_path, rows=rows)
    assert "1 calibration ids occur more than once, such as 'cal-0'" in caplog.text


def test_the_schedule_is_chosen_on_dev_and_the_other_is_recorded(tmp_path: Path) -> None:
    settings = config(schedule=Schedule.auto, measures=[Measure.softmax, Measure.state])
    softmax, state = run(tmp_path / "auto", settings)
    alone = {}
    for kind in (Schedule.constant, Schedule.decaying):
        asked = config(schedule=kind, measures=[Measure.softmax, Measure.state])
        alone[kind] = run(tmp_path / kind.value, asked)[0]
        assert alone[kind].schedule is kind
    dev = {kind: artifact.certificate(0.1).dev["layers_skipped"] for kind, artifact in alone.items()}
    best = max(dev, key=lambda kind: dev[kind])
    assert softmax.schedule is best
    (rejected,) = softmax.certificate(0.1).dev["rejected_schedules"].items()
    assert rejected == ((set(alone) - {best}).pop().value, min(dev.values()))
    assert softmax.grid == alone[best].grid
    assert state.schedule is Schedule.constant  # state never decays
    assert state.certificate(0.1).dev["rejected_schedules"] == {}


def test_dev_choice_is_within_the_budget_and_calibration_may_go_further(tmp_path: Path) -> None:
    (artifact,) = run(tmp_path, config(complete=True))
    dev = artifact.certificate(0.1).dev
    assert 0 < dev["mean_loss"] <= dev["budget"]
    assert artifact.grid[dev["index"]] == dev["threshold"]
    losses = ConsistencyLoss(Consistency.risk, DEV, FakeDecoder()(DEV, Full()))
    assert losses(FakeDecoder()(DEV, artifact.policy(dev["threshold"]))).mean() == pytest.approx(dev["mean_loss"])
    if dev["index"] + 1 < len(artifact.grid):
        beyond = artifact.policy(artifact.grid[dev["index"] + 1])
        assert losses(FakeDecoder()(DEV, beyond)).mean() > dev["budget"]


def test_textual_consistency_reuses_the_decodes_of_risk(tmp_path: Path) -> None:
    run(tmp_path, config(complete=True))
    decoder = FakeDecoder()
    (artifact,) = run(tmp_path, config(complete=True, consistency=Consistency.textual, tolerances=[0.25]), decoder)
    assert artifact.consistency is Consistency.textual
    assert not [ids for ids, _ in decoder.calls if ids[0].startswith("cal")]
    assert {path.name for path in tmp_path.glob("*.json")} == {"softmax-risk.json", "softmax-textual.json"}


def test_thresholds_per_layer_are_certified_along_one_path(tmp_path: Path) -> None:
    (artifact,) = run(tmp_path, config(per_layer=True))
    certificate = artifact.certificate(0.1)
    assert certificate.certified_below_one
    assert isinstance(certificate.threshold, tuple)
    assert len(certificate.threshold) == IDENTITY.num_layers - 1
    assert Artifact.load(tmp_path / "softmax-risk.json") == artifact
    assert artifact.policy(certificate.threshold).schedule.threshold == certificate.threshold


def test_unchecked_layers_never_enter_the_grid(tmp_path: Path) -> None:
    identity = replace(IDENTITY, exit_layers=(2, 4))
    decoder = FakeDecoder(exit_layers=(2, 4))
    (artifact,) = run(tmp_path, decode=decoder, identity=identity)
    assert artifact.certificate(0.1).certified_below_one
    assert artifact.identity.exit_layers == (2, 4)


def test_a_decoder_without_confidences_is_refused(tmp_path: Path) -> None:
    def forgetful(examples: Sequence[Example], policy: Policy) -> object:
        return [replace(trace, confidences=()) for trace in FakeDecoder()(examples, policy)]

    with pytest.raises(CalibrationError, match="record_confidences=True"):
        calibrate(forgetful, DEV, ROWS, config(), IDENTITY, tmp_path)  # type: ignore[arg-type]


def test_a_damaged_plan_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (artifact,) = run(tmp_path)
    plan = tmp_path / "work" / "plan-softmax-risk.json"
    plan.write_text(plan.read_text()[:50])
    assert run(tmp_path) == [artifact]
    assert "planning anew" in caplog.text


def test_equal_inputs_give_equal_files_and_the_ladder_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="calm.calibration")
    run(tmp_path / "a")
    run(tmp_path / "b")
    assert (tmp_path / "a/softmax-risk.json").read_bytes() == (tmp_path / "b/softmax-risk.json").read_bytes()
    assert "160 rows certify a mean loss up to" in caplog.text
    assert "thresholds certified, down to" in caplog.text


def test_progress_is_told_of_dev_and_calibration(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    calibrate(FakeDecoder(), DEV, ROWS, config(), IDENTITY, tmp_path, lambda *state: told.append(state))
    assert {total for what, _, total in told if what == "full depth"} == {160}
    assert any(what.startswith("dev-softmax") for what, _, _ in told)
    assert all(done <= total for _, done, total in told)


def test_the_policy_handed_to_the_decoder_is_the_artifacts(tmp_path: Path) -> None:
    decoder = FakeDecoder()
    (artifact,) = run(tmp_path, config(schedule=Schedule.decaying, tau=2.0), decoder)
    asked = [policy for ids, policy in decoder.calls if ids[0].startswith("cal")]
    assert asked[0] == Full()
    assert {policy for policy in asked if isinstance(policy, Confident)} <= {artifact.policy(t) for t in artifact.grid}
    assert artifact.policy(0.5).schedule.tau == 2.0
