"""eval.calibrate: what is certified is what the decoder does, and what cannot be is said before and after."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import calm
from calm.calibration import ConsistencyLoss, ModelIdentity, load_artifacts
from calm.calibration.trained import training_rows
from calm.checkpoint import verify_manifest
from calm.config import (
    Backfill,
    CalibrateConfig,
    CalibrationConfig,
    Consistency,
    DataConfig,
    DecoderName,
    Head,
    Measure,
    Precision,
    RowPolicy,
    RunnerName,
    SplitConfig,
    TrackingConfig,
    TrackingMode,
    TrainConfig,
    Weights,
)
from calm.data import load_corpus
from calm.errors import CalibrationError, ConfigError
from calm.models.folder import save
from calm.tracking import Tracker, read_metrics
from eval import calibrate
from serve.engine import Engine
from serve.native.build import NativeError, kernels, library
from serve.options import RequestOptions
from train.calibrate import run_calibration

from .conftest import MEASURES, TOLERANCE, calibration_config
from .folders import jsonl_settings, random_folder


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_each_tested_threshold_has_the_loss_and_depth_that_a_fresh_decode_gives(certified: Path) -> None:
    rows = load_corpus(jsonl_settings(certified / "rows.jsonl"), splits=("calibration",)).splits["calibration"]
    decode = calm.BatchDecoder(calm.load(certified / "model"), batch_size=16)
    loss = ConsistencyLoss(Consistency.risk, rows, decode(rows, calm.Full()))
    tested = 0
    for artifact in load_artifacts(certified / "model"):
        for index, (mean_loss, skipped) in enumerate(zip(artifact.mean_losses, artifact.layers_skipped, strict=True)):
            if index == 0:
                assert (mean_loss, skipped) == (0.0, 0.0)
                continue
            traces = decode(rows, artifact.policy(artifact.grid[index]))
            layers = [layer for trace in traces for layer in trace.emission_layers]
            assert mean_loss == pytest.approx(float(loss(traces).mean()), abs=1e-9)
            assert skipped == pytest.approx(1 - sum(layers) / len(layers) / 4)
            assert mean_loss > 0 and skipped > 0
            tested += 1
    assert tested >= len(MEASURES)


def test_artifacts_belong_to_the_folder_and_its_manifest_lists_them(certified: Path) -> None:
    folder = certified / "model"
    verify_manifest(folder)
    listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
    identity = ModelIdentity.of(calm.load(folder), folder, dtype="float32")
    for artifact in load_artifacts(folder):
        assert f"calibration/{artifact.name}.json" in listed
        artifact.check_against(identity)
        assert artifact.n == summary_of(certified / "calibration_run")["rows"]["calibration"]["n"]


def test_the_ladder_the_rows_needed_and_the_summary_are_told(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """From the cache of the first calibration, so nothing is decoded again."""
    caplog.set_level(logging.INFO, "calm")
    before = {path: path.read_bytes() for path in (certified / "model" / "calibration").iterdir()}
    assert calibrate.run(calibration_config(certified / "model"), tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    summary = json.loads(out[-1])
    assert summary == summary_of(tmp_path)
    assert [row["measure"] for row in summary["calibration"]] == [m.value for m in MEASURES]
    assert sum(row["picked"] for row in summary["calibration"]) == 1
    assert any("threshold  mean loss" in line for line in out)
    assert sum("no, stops here" in line for line in out) == len(MEASURES)
    assert any("calibration rows; needed: at tolerance 0.45" in message for message in caplog.messages)
    assert before == {path: path.read_bytes() for path in (certified / "model" / "calibration").iterdir()}


def test_where_nothing_passes_the_status_is_3_and_full_depth_is_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = random_folder(tmp_path, count=40)
    run = tmp_path / "run"
    run.mkdir()
    config = calibration_config(folder, tolerances=[0.05])
    assert calibrate.run(config, run) == calibrate.NOTHING_PASSED == 3
    assert any("certify nothing at tolerance 0.05" in message for message in caplog.messages)
    for row in summary_of(run)["calibration"]:
        assert (row["threshold"], row["certified_below_one"]) == (1.0, False)
    assert "full depth is all that is certified" in capsys.readouterr().out
    assert all(artifact.threshold_for(0.05) == 1.0 for artifact in load_artifacts(folder))


def test_the_engine_certifies_what_the_batch_decoder_certifies(own_copy: Path, certified: Path, tmp_path: Path) -> None:
    shutil.rmtree(own_copy / "calibration")
    config = calibration_config(own_copy, decoder=DecoderName.engine, measures=[Measure.softmax, Measure.state])
    before = calibration_config(own_copy, measures=[Measure.softmax, Measure.state])
    assert calibrate.run(config, tmp_path) == 0
    by_engine = load_artifacts(own_copy)
    assert {artifact.identity.decoder for artifact in by_engine} == {"engine"}
    shutil.rmtree(own_copy / "calibration")
    shutil.rmtree(own_copy.with_name("model-calibration"))
    assert calibrate.run(before, tmp_path) == 0
    for engine, batch in zip(by_engine, load_artifacts(own_copy), strict=True):
        assert engine.grid == pytest.approx(batch.grid, abs=1e-5) and engine.n == batch.n
        assert engine.mean_losses == pytest.approx(batch.mean_losses, abs=5e-3)
        assert engine.layers_skipped == pytest.approx(batch.layers_skipped, abs=5e-3)
        assert max(batch.layers_skipped) > 0


def test_a_candidate_head_is_certified_as_such_and_serves_nothing_else(own_copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(own_copy / "calibration")
    config = calibration_config(
        own_copy, decoder=DecoderName.engine, head=Head.candidates, measures=[Measure.softmax], tolerances=[0.9]
    )
    assert calibrate.run(config, tmp_path) == 0
    (artifact,) = load_artifacts(own_copy)
    assert artifact.identity.head == "candidates" and artifact.threshold_for(0.9) < 1.0
    options = RequestOptions(tolerance=0.9)
    served = Engine(own_copy, head=Head.candidates).generate(["a text"], options)[0]
    assert served.certified and served.status.value == "finished"
    with pytest.raises(CalibrationError, match="another way of decoding .*head: 'candidates' here, 'full' asked"):
        Engine(own_copy).generate(["a text"], options)


@pytest.mark.parametrize("weights", Weights)
def test_what_is_served_in_bf16_or_int8_is_certified_so(own_copy: Path, tmp_path: Path, weights: Weights) -> None:
    """Natively, where no mate and no batch size changes a bit, so that one decode speaks of every batch."""
    try:
        library()
    except NativeError as error:
        pytest.skip(str(error))
    shutil.rmtree(own_copy / "calibration")
    config = calibration_config(
        own_copy, decoder=DecoderName.engine, runner=RunnerName.native, weights=weights, measures=[Measure.softmax],
        tolerances=[0.9],
    )  # fmt: skip
    assert calibrate.run(replace(config, precision=Precision.bf16), tmp_path) == 0
    (artifact,) = load_artifacts(own_copy)
    name = f"{'int8 on ' if weights is Weights.int8 else ''}bfloat16/native {kernels()}"
    assert artifact.identity.dtype == name and artifact.threshold_for(0.9) < 1.0
    options = RequestOptions(tolerance=0.9)
    for batch in (1, 5):
        shape = dict(max_batch=batch, prefill_rows=batch, source_multiple=1 + 7 * batch)
        engine = Engine(own_copy, dtype=torch.bfloat16, runner="native", weights=weights, **shape)
        assert all(answer.certified for answer in engine.generate(["a text"] * 6, options))
    others = [
        (dict(dtype=torch.bfloat16, runner="eager"), "'bfloat16' asked"),
        (dict(runner="native"), "'float32' asked"),
    ]
    for other, asked in others:
        with pytest.raises(CalibrationError, match=f"dtype: '{name}' here, .*{asked}"):
            Engine(own_copy, **other).generate(["a text"], options)


def test_training_calibrates_with_the_same_result(certified: Path, tmp_path: Path) -> None:
    """The stage of ``python -m train`` on a folder of its own."""
    folder = Path(shutil.copytree(certified / "model", tmp_path / "model"))
    shutil.rmtree(folder / "calibration")
    settings = calibration_config(folder).calibration
    config = TrainConfig(data=jsonl_settings(certified / "rows.jsonl"), calibration=settings, processes=1)
    made = run_calibration(folder, config, tmp_path, Tracker(tmp_path, TrackingConfig(TrackingMode.disabled), "train"))
    assert [artifact.measure for artifact in made] == MEASURES
    assert sorted(made, key=lambda artifact: artifact.name) == load_artifacts(folder)
    assert load_artifacts(folder) == load_artifacts(certified / "model")
    event = next(line for line in read_metrics(tmp_path) if line.get("event") == "calibration")
    assert event["rows"] == made[0].n
    assert event["results"][f"state-risk-{TOLERANCE:g}"]["threshold"] == made[1].threshold_for(TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": Head.screened}, "needs (the engine|decoder=engine)"),
        ({"decoder": DecoderName.engine, "backfill": Backfill.copy}, "fills by 'project' only, not by 'copy'"),
        (
            {"precision": Precision.bf16},
            "in bfloat16 an answer depends on the size of its batch.* or the native runner",
        ),
        (
            {"precision": Precision.bf16, "decoder": DecoderName.engine, "runner": RunnerName.eager},
            "an answer depends on the size of its batch",
        ),
        ({"weights": Weights.int8}, "weights=int8 needs decoder=engine"),
    ],
)
def test_what_this_version_lacks_is_one_clear_error(
    certified: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    precision = changes.get("precision", Precision.auto)
    settings = {name: value for name, value in changes.items() if name != "precision"}
    config = replace(calibration_config(certified / "model", **settings), precision=precision)
    with pytest.raises(ConfigError, match=message):
        calibrate.run(config, tmp_path)
    assert not (tmp_path / "summary.json").exists()


def resplit(certified: Path) -> DataConfig:
    """Another split of the rows that were trained on: nearly all of the former train split is in calibration."""
    return replace(jsonl_settings(certified / "rows.jsonl"), split=SplitConfig(dev=0.01, calibration=0.65, test=0.33))


def renamed(certified: Path, folder: Path) -> DataConfig:
    """The same texts in another file, each of a family of its own name."""
    path = folder / "renamed.jsonl"
    lines = [json.loads(line) for line in (certified / "rows.jsonl").read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "topic": f"t{i}"}) + "\n" for i, line in enumerate(lines)))
    return replace(jsonl_settings(path), family_column="topic")


@pytest.mark.parametrize("which", ["another split", "other families in another file"])
@pytest.mark.parametrize("program", ["eval.calibrate", "train stage=calibrate"])
def test_rows_that_the_model_was_trained_on_certify_nothing(
    own_copy: Path, certified: Path, tmp_path: Path, which: str, program: str
) -> None:
    data = resplit(certified) if which == "another split" else renamed(certified, tmp_path)
    shutil.rmtree(own_copy / "calibration")
    config = calibration_config(own_copy)
    with pytest.raises(CalibrationError, match="lie in more than one split, .*train.*nothing can be certified"):
        if program == "eval.calibrate":
            calibrate.run(replace(config, data=data), tmp_path)
        else:
            training = TrainConfig(data=data, calibration=config.calibration, processes=1)
            run_calibration(own_copy, training, tmp_path, None)
    assert load_artifacts(own_copy) == []


def test_rows_of_the_trained_split_are_read_only_where_they_can_overlap(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calm.load(certified / "model")
    same, path = jsonl_settings(certified / "rows.jsonl"), certified / "rows.jsonl"
    rows = load_corpus(same, splits=("train",)).splits["train"]
    assert training_rows(model, resplit(certified)) == rows != []
    monkeypatch.setattr("calm.calibration.trained.load_corpus", lambda *_, **__: pytest.fail("the corpus was read"))
    monkeypatch.chdir(path.parent)
    unchanged = [same, replace(same, max_eval_rows=5, max_train_rows=3, cache_dir="x", row_policy=RowPolicy.skip)]
    for data in [*unchanged, replace(same, path=path.name)]:
        assert training_rows(model, data) == []
    model.settings.data = {}
    assert training_rows(model, resplit(certified)) == []


def test_a_trained_corpus_that_is_gone_is_a_warning(
    certified: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = calm.load(certified / "model")
    model.settings.data = {**model.settings.data, "path": str(tmp_path / "gone.jsonl")}
    assert training_rows(model, jsonl_settings(certified / "rows.jsonl")) == []
    (told,) = caplog.messages
    assert "could not be checked" in told and "gone.jsonl: there is no such file" in told


def test_a_model_without_an_exit_classifier_is_told_before_anything_is_decoded(certified: Path, tmp_path: Path) -> None:
    model = calm.load(certified / "model")
    model.settings = replace(model.settings, has_classifier=False)
    folder = save(model, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"calibration.measures=\[softmax,state\]"):
        calibrate.run(calibration_config(folder), tmp_path)
    assert not (tmp_path / "model-calibration").exists()


def test_a_folder_that_does_not_say_its_corpus_asks_for_one(certified: Path, tmp_path: Path) -> None:
    model = calm.load(certified / "model")
    model.settings = replace(model.settings, data={})
    folder = save(model, tmp_path / "model")
    with pytest.raises(ConfigError, match="choose a corpus with data=NAME"):
        calibrate.run(calibration_config(folder), tmp_path)


def test_several_tolerances_each_hold_by_themselves(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(certified / "model", tmp_path / "model"))
    config = calibration_config(folder, tolerances=[TOLERANCE, 0.6], measures=[Measure.state])
    assert calibrate.run(config, tmp_path) == 0
    assert "not all of them at once" in capsys.readouterr().out
    tolerances = [row["tolerance"] for row in summary_of(tmp_path)["calibration"]]
    assert tolerances == [TOLERANCE, 0.6]


def test_thresholds_are_certified_again_from_logged_requests(own_copy: Path, certified: Path, tmp_path: Path) -> None:
    sources = [json.loads(line)["source"] for line in (certified / "rows.jsonl").read_text().splitlines()]
    log = tmp_path / "server.log"
    log.write_text("".join(json.dumps({"id": f"r{i}", "prompt": text}) + "\n" for i, text in enumerate(sources)))
    asked = CalibrationConfig(
        measures=[Measure.state], consistency=Consistency.textual, tolerances=[0.7], grid_size=5, batch_size=16
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert calibrate.run(CalibrateConfig(str(own_copy), None, str(log), asked, processes=1), run_dir) == 0
    summary = summary_of(run_dir)
    unique = len(set(sources))
    assert summary["corpus"]["name"] == "requests" and 0.6 * unique < summary["rows"]["calibration"]["n"] < unique
    artifact = next(a for a in load_artifacts(own_copy) if a.consistency is Consistency.textual)
    assert artifact.certificate(0.7).certified_below_one and artifact.n == summary["rows"]["calibration"]["n"]
    assert any(a.consistency is Consistency.risk for a in load_artifacts(own_copy))  # those of the corpus stay


def test_a_log_certifies_no_risk_and_excludes_a_corpus() -> None:
    with pytest.raises(ConfigError, match="a log holds no references, .* calibration.consistency=textual"):
        CalibrateConfig(from_log="x.log")
    textual = CalibrationConfig(consistency=Consistency.textual)
    with pytest.raises(ConfigError, match="from_log= and data= exclude each other"):
        CalibrateConfig(from_log="x.log", data=DataConfig(name="debian"), calibration=textual)
