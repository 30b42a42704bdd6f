"""Calibration of a small T5 by both reference decoders, from a saved folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from calm.calibration import Artifact, ModelIdentity
from calm.calibration.calibrate import calibrate
from calm.calibration.consistency import ConsistencyLoss
from calm.config import CalibrationConfig, Consistency, Measure, Schedule
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import CalibrationError
from calm.models.folder import load, save
from calm.models.t5 import EarlyExitT5
from calm.policies import Full
from calm.records import Example
from tests.scripted import early_exit, examples, random_t5

MEASURES = [Measure.softmax, Measure.state, Measure.classifier, Measure.agreement]
CONFIG = CalibrationConfig(
    measures=MEASURES,
    consistency=Consistency.textual,
    tolerances=[0.6],
    error_prob=0.2,
    grid_size=4,
    schedule=Schedule.auto,
    batch_size=8,
    complete=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(early_exit(random_t5(seed=1), length=6), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> EarlyExitT5:
    return load(folder)


def rows(count: int, seed: int, name: str) -> list[Example]:
    found = examples(97, count, seed=seed)
    return [replace(row, id=f"{name}-{row.id}", family=f"{name}-{row.family}") for row in found]


DEV, CALIBRATION = rows(8, 31, "dev"), rows(12, 32, "cal")


@pytest.fixture(scope="module")
def artifacts(model: EarlyExitT5, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    decode = BatchDecoder(model, batch_size=8, record_confidences=True)
    identity = ModelIdentity.of(model, folder, dtype="float32")
    return calibrate(decode, DEV, CALIBRATION, CONFIG, identity, tmp_path_factory.mktemp("batch"))


def test_every_mean_loss_is_that_of_a_fresh_decode_row_by_row(model: EarlyExitT5, artifacts: list[Artifact]) -> None:
    decode = OneDecoder(model)
    loss = ConsistencyLoss(Consistency.textual, CALIBRATION, decode(CALIBRATION, Full()))
    for artifact in artifacts:
        for threshold, mean_loss in zip(artifact.grid[1:3], artifact.mean_losses[1:3], strict=True):
            fresh = loss(decode(CALIBRATION, artifact.policy(threshold)))
            assert fresh.mean() == pytest.approx(mean_loss, abs=1e-12), (artifact.name, threshold)


def test_losses_vary_and_something_is_certified(artifacts: list[Artifact]) -> None:
    assert all(max(artifact.mean_losses) > 0 for artifact in artifacts)
    assert all(artifact.layers_skipped[-1] > artifact.layers_skipped[0] == 0.0 for artifact in artifacts)
    assert any(artifact.certificate(0.6).certified_below_one for artifact in artifacts)
    assert sum(artifact.certificate(0.6).picked for artifact in artifacts) == 1


def test_a_retrained_classifier_or_another_tokenizer_is_refused(
    model: EarlyExitT5, folder: Path, tmp_path: Path, artifacts: list[Artifact]
) -> None:
    artifacts[0].check_against(ModelIdentity.of(load(folder), folder, dtype="float32"))
    again = load(folder)
    again.classifier.linear.bias.data.add_(0.1)
    other = save(again, tmp_path / "other")
    with pytest.raises(CalibrationError, match=r"does not belong .*\(model: "):
        artifacts[0].check_against(ModelIdentity.of(again, other, dtype="float32"))
    copy = save(model, tmp_path / "copy")
    artifacts[0].check_against(ModelIdentity.of(model, copy, dtype="float32"))
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w5"', '"w555"'))
    with pytest.raises(CalibrationError, match=r"does not belong .*\(tokenizer: "):
        artifacts[0].check_against(ModelIdentity.of(model, copy, dtype="float32"))
