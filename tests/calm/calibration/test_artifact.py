"""The artifact: what it answers, and everything that it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calm.calibration import Artifact, Certificate, load_artifacts
from calm.calibration.identity import ModelIdentity, hash_files, hash_json, hash_rows
from calm.config import Consistency, Measure, Schedule
from calm.errors import CalibrationError
from calm.models.settings import EarlyExitSettings
from calm.records import Example

from .fake_decoder import IDENTITY


def certificate(tolerance: float, p_values: tuple[float, ...], certified: tuple[Any, ...]) -> Certificate:
    return Certificate(tolerance, p_values, certified, certified[-1], 59, True, {"budget": 0.03})


def artifact(grid: tuple[Any, ...] = (1.0, 0.9, 0.8), **changes: Any) -> Artifact:
    values: dict[str, Any] = dict(
        measure=Measure.softmax,
        consistency=Consistency.risk,
        schedule=Schedule.constant,
        tau=4.0,
        agreement_k=3,
        grid=grid,
        error_prob=0.05,
        test_level=0.05,
        measures=(Measure.softmax,),
        n=500,
        mean_losses=(0.0, 0.01, 0.04),
        layers_skipped=(0.0, 0.3, 0.5),
        article_skips=((0.0, 0.0), (0.3, 0.1), (0.5, 0.2)),
        exit_shares=((0.0, 1.0), (0.5, 0.5), (0.9, 0.1)),
        complete=True,
        certificates=(
            certificate(0.05, (0.0, 0.001, 0.3), grid[:2]),
            certificate(0.02, (0.0, 0.2, 0.9), grid[:1]),
        ),
        identity=IDENTITY,
        calibration_rows="c" * 64,
        dev_rows="d" * 64,
        metric="rougeL",
        code_version="0.1.0",
    )
    return Artifact(**{**values, **changes})


@pytest.mark.parametrize("grid", [(1.0, 0.9, 0.8), (1.0, (0.9, 0.8), (0.9, 0.7))])
def test_an_artifact_survives_the_disk(tmp_path: Path, grid: tuple[Any, ...]) -> None:
    saved = artifact(grid)
    path = saved.save(tmp_path / "calibration")
    assert path.name == "softmax-risk.json"
    assert Artifact.load(path) == saved
    assert load_artifacts(tmp_path) == load_artifacts(tmp_path / "calibration") == [saved]
    assert load_artifacts(tmp_path / "calibration" / "nowhere") == []


def test_lookups() -> None:
    found = artifact()
    assert found.threshold_for(0.05) == found.threshold_for(0.05, Consistency.risk) == 0.9
    assert found.certificate(0.05).certified_below_one
    assert found.is_certified(0.9, 0.05) and found.is_certified(1.0, 0.05) and not found.is_certified(0.8, 0.05)
    assert not found.is_certified(0.95, 0.05)  # between two certified thresholds is not certified
    assert found.threshold_for(0.02) == 1.0
    assert not found.certificate(0.02).certified_below_one
    with pytest.raises(CalibrationError, match=r"not tested at tolerance 0.1, only at 0.05, 0.02.*tolerances=\[0.1\]"):
        found.threshold_for(0.1)
    with pytest.raises(CalibrationError, match="certifies risk consistency, textual was asked"):
        found.threshold_for(0.05, Consistency.textual)


def test_policy_carries_measure_schedule_and_full_length() -> None:
    policy = artifact(schedule=Schedule.decaying, agreement_k=2).policy(0.9)
    assert (policy.measure, policy.agreement_k) == (Measure.softmax, 2)
    assert (policy.schedule.kind, policy.schedule.length, policy.schedule.threshold) == (Schedule.decaying, 8, 0.9)


OTHERS = {
    "model": "e" * 64,
    "tokenizer": "e" * 64,
    "dtype": "bfloat16",
    "head": "screened",
    "exit_layers": (2, 4),
    "num_layers": 12,
    "max_target_tokens": 64,
    "max_source_tokens": 512,
    "backfill": "copy",
    "source_prefix": "summarize: ",
    "truncate": "head_tail",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_identity_is_refused_by_name_with_both_values(name: str) -> None:
    other = replace(IDENTITY, **{name: OTHERS[name]})
    with pytest.raises(CalibrationError) as caught:
        artifact().check_against(other)
    message = str(caught.value)
    assert f"{name}: " in message
    if name not in ("model", "tokenizer"):
        shown = OTHERS[name] if not isinstance(OTHERS[name], tuple) else list(OTHERS[name])
        assert repr(shown) in message
    assert message.count("asked") == 1
    assert "\n" not in message


def test_the_same_identity_is_accepted_whoever_decoded() -> None:
    artifact().check_against(replace(IDENTITY, decoder="one", rule="compact"), Measure.softmax)
    with pytest.raises(CalibrationError, match="measure: 'softmax' here, 'state' asked"):
        artifact().check_against(IDENTITY, Measure.state)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"threshold": 0.9', '"threshold": 0.8'), ('"n": 500', '"n": 5000'), ('"picked": true', '"picked": false')],
)
def test_an_edited_artifact_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = artifact().save(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CalibrationError, match="was edited"):
        Artifact.load(path)


def test_a_signed_certificate_that_does_not_follow_from_its_p_values_is_refused() -> None:
    first_failing = artifact(certificates=(certificate(0.05, (0.0, 0.001, 0.3), (1.0, 0.9, 0.8)),))
    with pytest.raises(CalibrationError, match="does not follow from its p-values"):
        Artifact.loads(first_failing.dumps(), "here")
    with pytest.raises(CalibrationError, match="a grid must descend"):
        Artifact.loads(artifact(grid=(1.0, 0.8, 0.9)).dumps(), "here")


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"signature": "x"}', '"words"'])
def test_what_is_no_artifact_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "softmax-risk.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="is no calibration artifact"):
        Artifact.load(path)


def test_a_missing_file_another_format_and_other_entries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot read calibration"):
        Artifact.load(tmp_path / "none.json")
    values = json.loads(artifact().dumps())
    with pytest.raises(CalibrationError, match="has format 99, expected 2"):
        Artifact.loads(json.dumps({**values, "format": 99}), "here")
    values.pop("signature")
    values.pop("tau")
    with pytest.raises(CalibrationError, match=r"missing entries \['tau'\]"):
        Artifact.loads(json.dumps({**values, "signature": hash_json(values)}), "here")


def write_folder(folder: Path, **contents: str) -> Path:
    folder.mkdir()
    for name, content in {"config.json": '{"d": 1}', "model.safetensors": "w", "tokenizer.json": "{}"}.items():
        (folder / name).write_text(contents.get(name.split(".")[0], content))
    return folder


def test_identity_hashes_content_not_place_or_writer(tmp_path: Path) -> None:
    names = ("model.safetensors", "config.json")
    one = write_folder(tmp_path / "one")
    two = write_folder(tmp_path / "two", config='{"transformers_version": "9",\n "d": 1}')
    assert hash_files(one, names) == hash_files(two, names)
    assert hash_files(one, names) != hash_files(write_folder(tmp_path / "three", model="v"), names)
    assert hash_files(one, names) != hash_files(write_folder(tmp_path / "four", config='{"d": 2}'), names)
    with pytest.raises(CalibrationError, match="holds none of spiece.model"):
        hash_files(one, ("spiece.model",))


def test_identity_of_a_model_reads_settings_and_folder(tmp_path: Path) -> None:
    class Model:
        num_layers = 6
        settings = EarlyExitSettings([1, 3], max_source_tokens=40, max_target_tokens=20, source_prefix="p: ")

    folder = write_folder(tmp_path / "model")
    identity = ModelIdentity.of(Model(), folder, dtype="float32")  # type: ignore[arg-type]
    assert identity.exit_layers == (1, 3)
    assert (identity.max_target_tokens, identity.source_prefix, identity.backfill) == (20, "p: ", "project")
    assert ModelIdentity.from_json(json.loads(json.dumps(identity.to_json()))) == identity


def test_row_hashes_know_every_field_and_the_order() -> None:
    a, b = Example("1", "f", "s", "t"), Example("2", "g", "s\ud800", "t")
    assert len({hash_rows(rows) for rows in ([a, b], [b, a], [a], [replace(a, target="u"), b])}) == 4
    assert hash_rows([a, b]) == hash_rows(iter([a, b]))
