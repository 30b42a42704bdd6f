"""A decoder-only folder is calibrated and tabled by the engine as it is by decode_batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from calm.calibration import load_artifacts
from calm.calibration.artifact import choose_artifact
from calm.config import BatchRule, Consistency, DecoderName, Measure, RunnerName
from eval import calibrate, table1
from serve.engine import Engine
from tests.causal import early_llama, random_llama

from .conftest import TOLERANCE, calibration_config, table_config
from .folders import LENGTH, VOCABULARY, random_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = early_llama(random_llama(vocabulary=VOCABULARY), length=LENGTH)
    return random_folder(tmp_path_factory.mktemp("llama"), model=model)


def summary_of(run: Any, config: Any, place: Path) -> dict[str, Any]:
    place.mkdir()
    run(config, place)
    found: dict[str, Any] = json.loads((place / "summary.json").read_text())
    return found


def test_the_engine_certifies_what_decode_batch_certifies(folder: Path, tmp_path: Path) -> None:
    found = {}
    for decoder in (DecoderName.batch, DecoderName.engine):
        config = calibration_config(folder, measures=[Measure.softmax, Measure.state], decoder=decoder)
        found[decoder] = summary_of(calibrate.run, config, tmp_path / decoder.value)["calibration"]
    for mine, theirs in zip(found[DecoderName.engine], found[DecoderName.batch], strict=True):
        assert mine == {**theirs, "threshold": pytest.approx(theirs["threshold"], rel=1e-5)}
    artifact = choose_artifact(load_artifacts(folder), Consistency.risk, None, TOLERANCE)
    assert artifact.certificate(TOLERANCE).certified_below_one
    engine = Engine(folder, rule=BatchRule.compact, max_batch=4)
    assert engine.runner_name is RunnerName.eager
    sources = ["w5 w9", "w7 w8 w11 w30", "w4"]
    answers = engine.generate(sources, tolerance=TOLERANCE)
    assert all(answer.certified for answer in answers)
    assert {layer for answer in answers for layer in answer.emission_layers[1:]} != {4}


def test_table_1_is_the_same_by_both(folder: Path, tmp_path: Path) -> None:
    rows = {}
    for decoder in (DecoderName.batch, DecoderName.engine):
        config = table_config(folder, decoder=decoder, tolerance=TOLERANCE)
        rows[decoder] = summary_of(table1.run, config, tmp_path / decoder.value)["rows"]
    assert rows[DecoderName.engine] == rows[DecoderName.batch]
