"""Whole runs in small: what stops them, what they leave behind, what is on record."""

import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import calm
from calm.checkpoint import verify_manifest
from calm.config import Device, LrSchedule, Measure, OptimizerName, Precision, SplitConfig, Stage, TrackingMode
from calm.errors import CheckpointError, ConfigError, TrainingError
from calm.locking import RunLock
from calm.tracking import Tracker, read_metrics
from tests.calm.test_tracking import offline_records
from tests.train.tiny import curve, events, run_processes, scores, start_processes, tiny_config, train_job
from train import loop as loop_module
from train import step as step_module
from train.context import resolve_precision
from train.run import train


def test_a_run_leaves_the_best_model_and_a_record(tmp_path: Path) -> None:
    assert train(tiny_config(finetune__keep=1), tmp_path) == 0
    verify_manifest(tmp_path / "model")
    best = max(scores(tmp_path).items(), key=lambda item: (item[1], -item[0]))[0]
    assert (tmp_path / "checkpoints/best").read_text() == f"step-{best:06d}\n"
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000006\n"
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {"step-000006", f"step-{best:06d}"}
    written = (tmp_path / "model/model.safetensors").read_bytes()
    assert written == (tmp_path / f"checkpoints/step-{best:06d}/model/model.safetensors").read_bytes()
    model = calm.load(tmp_path / "model")
    assert model.settings.exit_layers == [1, 2] and model.settings.data["name"] == "restaurants"
    assert not model.settings.has_classifier
    line = next(record for record in read_metrics(tmp_path) if "train/loss" in record)
    assert {"lr", "tokens_per_s", "train/loss_layer_03", "peak_memory_gib"} <= set(line)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["program"] == "train" and record["config"]["finetune"]["lr"] == 1e-2
    assert record["environment"]["packages"]["torch"] and record["wall_s"] > 0
    assert not list(tmp_path.rglob("*.pkl")) and not list(tmp_path.rglob("*.pt"))


def test_a_run_of_the_first_layers_of_a_checkpoint_and_of_uniform_exits(tmp_path: Path) -> None:
    assert train(tiny_config(finetune__steps=1), tmp_path / "whole") == 0
    go_on = {"model": None, "finetune__steps": 2, "checkpoint": str(tmp_path / "whole/model")}
    assert train(tiny_config(decoder_layers=2, **go_on), tmp_path / "cut") == 0
    assert calm.load(tmp_path / "cut/model").num_layers == 2
    with pytest.raises(ConfigError, match="resume= with changed settings is refused .decoder_layers: 2 -> None"):
        train(tiny_config(resume=str(tmp_path / "cut"), **go_on), tmp_path / "cut")
    assert train(tiny_config(finetune__uniformity__weight=2.0, **go_on), tmp_path / "uniform") == 0
    told = [record for record in read_metrics(tmp_path / "uniform") if "train/loss" in record]
    assert len(told) == 2 and all(0.0 < record["train/exit_spread"] < 0.25 for record in told)
    assert not any("train/exit_spread" in record for record in read_metrics(tmp_path / "cut"))


def test_a_model_that_goes_on_remembers_every_corpus_it_was_trained_on(tmp_path: Path) -> None:
    def corpora(name: str) -> list[int]:
        settings = calm.load(tmp_path / name / "model").settings
        return [each["size"] for each in [settings.data, *settings.earlier_data]]

    assert train(tiny_config(finetune__steps=1), tmp_path / "first") == 0
    go_on = {"model": None, "finetune__steps": 1}
    for name, start, size in (("same", "first", 160), ("other", "same", 150), ("back", "other", 160)):
        config = tiny_config(checkpoint=str(tmp_path / start / "model"), data__size=size, **go_on)
        assert train(config, tmp_path / name) == 0
    assert (corpora("first"), corpora("same")) == ([160], [160])
    assert (corpora("other"), corpora("back")) == ([150, 160], [160, 150])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_rate_on_record_is_that_of_the_optimizer_step(tmp_path: Path, accumulation: int) -> None:
    config = tiny_config(
        finetune__steps=4, finetune__warmup_steps=0, finetune__lr=1.0, finetune__lr_schedule=LrSchedule.linear,
        finetune__accumulation=accumulation, finetune__batch_size=6, finetune__eval_every=99,
    )  # fmt: skip
    if accumulation == 1:
        assert run_processes(2, train_job, config, tmp_path, log=tmp_path / "log") == [0, 0]
    else:
        assert train(config, tmp_path) == 0
    rates = {record["step"]: record["lr"] for record in read_metrics(tmp_path) if "lr" in record}
    assert rates == {1: 0.75, 2: 0.5, 3: 0.25, 4: 0.0}


def test_adafactor_checkpointing_and_dropout_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    prepare = loop_module.prepare_model

    def spy(model: Any, config: Any) -> Any:
        prepared = prepare(model, config)
        seen.extend(m.p for m in prepared.modules() if isinstance(m, torch.nn.Dropout))
        seen.extend(m.dropout for m in prepared.modules() if isinstance(getattr(m, "dropout", None), float))
        assert prepared.hf.is_activation_checkpointing
        return prepared

    monkeypatch.setattr(loop_module, "prepare_model", spy)
    config = tiny_config(
        finetune__optimizer=OptimizerName.adafactor, finetune__gradient_checkpointing=True, finetune__dropout_rate=0.2
    )
    assert train(config, tmp_path) == 0
    assert set(seen) == {0.2}
    assert list(curve(tmp_path).values())[-1][0] < curve(tmp_path)[1][0]
    state = json.loads((tmp_path / "checkpoints/step-000006/optimizer.json").read_text())
    assert state["kind"] == "adafactor" and any("step" in values for values in state["scalars"].values())


class Poison:
    """Losses that are NaN at some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.forward = steps, step_module.SpeakingLoss.forward

    def __call__(self, module: Any, batch: Any, step: int) -> Any:
        total, layers = self.forward(module, batch, step)
        return (total * float("nan"), layers) if step in self.steps else (total, layers)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    poisoned = Poison(steps)
    monkeypatch.setattr(step_module.SpeakingLoss, "forward", lambda self, batch, step: poisoned(self, batch, step))


def test_bad_steps_are_skipped_named_counted_and_never_logged_as_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 3})
    assert train(tiny_config(), tmp_path) == 0
    told = events(tmp_path, "bad_step")
    assert [event["step"] for event in told] == [2, 4] and all(len(event["rows"]) == 8 for event in told)
    losses = {record["step"]: record["train/loss"] for record in read_metrics(tmp_path) if "train/loss" in record}
    assert losses[2] is None and losses[4] is None and all(math.isfinite(losses[step]) for step in (1, 3, 5, 6))
    assert json.loads((tmp_path / "checkpoints/step-000006/trainer_state.json").read_text())["bad_steps"] == 2


def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 3, 4, 5})
    with pytest.raises(TrainingError, match="2 steps in a row .* rows: .* last good checkpoint is .*step-000004"):
        train(tiny_config(finetune__max_bad_steps=2), tmp_path)
    verify_manifest(tmp_path / "checkpoints/step-000004")
    assert len(events(tmp_path, "bad_step")) == 3


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_leaves_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, status: int
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    account = loop_module.Finetune._account

    def signalled(self: Any, result: Any) -> None:
        account(self, result)
        if self.state.step == 2 and not self.context.config.resume:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(loop_module.Finetune, "_account", signalled)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert train(tiny_config(), stopped) == status
        verify_manifest(stopped / "checkpoints/step-000003")
        assert not (stopped / "model").exists() and max(curve(stopped)) == 3
        assert train(tiny_config(resume=str(stopped)), stopped) == 0
    finally:
        for each, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(each, handler)
    monkeypatch.setattr(loop_module.Finetune, "_account", account)
    assert train(tiny_config(), whole) == 0
    assert curve(stopped) == curve(whole) and scores(stopped) == scores(whole)


def stubborn_job(run_dir: Path) -> None:
    """Says when it is inside a step, then stays there."""
    from train.signals import Signals

    signals = Signals()
    signals.install()
    with signals.deferred():
        (run_dir / "inside").touch()
        while not signals.received:  # asked, not waited for: a signal may come before any wait begins
            os.sched_yield()
        (run_dir / "heard").touch()
        while True:
            signal.pause()


def test_a_second_signal_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (process,) = start_processes(1, stubborn_job, tmp_path, log=tmp_path / "log")
    for mark in ("inside", "heard"):
        while not (tmp_path / mark).exists():
            assert process.is_alive()
            os.sched_yield()
        os.kill(process.pid or 0, signal.SIGTERM)
    while process.is_alive():  # within SAME_WITHIN_S a repetition is one Ctrl-C that came twice
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(0.05)
    assert process.exitcode == 143
    assert "saving a checkpoint" in (tmp_path / "log").read_text()


def test_the_second_trainer_of_a_folder_fails_fast(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(TrainingError, match=f"in use by process {os.getpid()}"):
        train(tiny_config(), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_vanished_folder_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    account = loop_module.Finetune._account

    def vanish(self: Any, result: Any) -> None:
        account(self, result)
        if self.state.step == 3:
            shutil.rmtree(run_dir)

    monkeypatch.setattr(loop_module.Finetune, "_account", vanish)
    with pytest.raises(TrainingError, match=r"cannot write .*metrics.jsonl: No such file.* The run stops"):
        train(tiny_config(), run_dir)


def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    account = loop_module.Finetune._account

    def fill(self: Any, result: Any) -> None:
        account(self, result)
        if self.state.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    monkeypatch.setattr(loop_module.Finetune, "_account", fill)
    try:
        with pytest.raises(CheckpointError, match=r"/step-000003/model/model.*File too large.*; it needs [\d,]+ bytes"):
            train(tiny_config(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    verify_manifest(tmp_path / "checkpoints/step-000002")
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if ".tmp-" in path.name]
    monkeypatch.setattr(loop_module.Finetune, "_account", account)
    assert train(tiny_config(resume=str(tmp_path)), tmp_path) == 0


def test_out_of_memory_names_batch_and_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(step_module.SpeakingLoss, "forward", exhausted)
    with pytest.raises(TrainingError, match=r"batch_size=8 .* finetune.accumulation=2 .* resume="):
        train(tiny_config(), tmp_path)


def test_what_cannot_be_done_here_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        train(tiny_config(device=Device.cuda), tmp_path)
    with pytest.raises(ConfigError, match="bf16"):
        train(tiny_config(precision=Precision.fp16), tmp_path)
    with pytest.raises(ConfigError, match="stage=classifier needs a trained model"):
        train(tiny_config(stage=Stage.classifier), tmp_path)
    with pytest.raises(ConfigError, match=r"exit_layers \[7\] lie outside"):
        train(tiny_config(exit_layers=[7]), tmp_path)
    with pytest.raises(ConfigError, match=r"min_exit_layer=3 leaves no exit of \[1, 2\].* give at most 2"):
        train(tiny_config(min_exit_layer=3), tmp_path)


def test_a_folder_keeps_its_exits_unless_others_are_asked_for(tmp_path: Path) -> None:
    first = tmp_path / "first/model"
    assert train(tiny_config(finetune__steps=1, exit_layers=[2]), first.parent) == 0
    for name, changes, exits in (("own", {}, [2]), ("other", {"exit_layers": [1]}, [1])):
        config = tiny_config(model=None, checkpoint=str(first), finetune__steps=1, **changes)
        assert train(config, tmp_path / name) == 0
        assert calm.load(tmp_path / name / "model").settings.exit_layers == exits
    config.resume, config.exit_layers, config.allow_override = str(tmp_path / "other"), None, ["exit_layers"]
    assert train(config, tmp_path / "other") == 0
    assert calm.load(tmp_path / "other/model").settings.exit_layers == [1, 2]
    for changes in ({"exit_layers": [1, 2]}, {"min_exit_layer": 3}):
        for where in ({"checkpoint": str(first)}, {"resume": str(first.parent)}):
            config = tiny_config(stage=Stage.calibrate, model=None, **where, **changes)
            with pytest.raises(ConfigError, match=r"stage=calibrate certifies .* as it is, with exit_layers=\[2\]"):
                train(config, first.parent)


def test_going_on_from_a_model_folder_with_its_classifier_stage(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert train(tiny_config(finetune__steps=2), first) == 0
    config = tiny_config(stage=Stage.classifier, model=None, checkpoint=str(first / "model"), classifier__steps=5)
    config.output = str(second / "out")
    assert train(config, second) == 0
    model, before = calm.load(second / "out"), calm.load(first / "model")
    assert model.settings.has_classifier and not before.settings.has_classifier
    assert model.classifier.linear.weight.abs().max() > 0
    for name, value in before.hf.state_dict().items():
        assert torch.equal(model.hf.state_dict()[name], value)
    again = tiny_config(model=None, checkpoint=str(second / "out"), finetune__steps=2)
    assert train(again, third) == 0  # a new backbone voids the classifier
    assert not calm.load(third / "model").settings.has_classifier


def test_bf16_is_trained_by_autocast_with_weights_in_fp32(tmp_path: Path) -> None:
    assert train(tiny_config(precision=Precision.bf16, finetune__steps=2), tmp_path) == 0
    assert calm.load(tmp_path / "model").dtype is torch.float32
    assert all(math.isfinite(loss) for loss, _ in curve(tmp_path).values())


def test_auto_is_bf16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for native, chosen in ((True, Precision.bf16), (False, Precision.fp32)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        assert resolve_precision(Precision.auto, cpu) is chosen
    assert resolve_precision(Precision.fp32, cpu) is Precision.fp32


def test_deterministic_runs_are_equal(tmp_path: Path) -> None:
    try:
        runs = [tmp_path / name for name in "ab"]
        assert [train(tiny_config(deterministic=True, finetune__steps=3), run) for run in runs] == [0, 0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert curve(runs[0]) == curve(runs[1])


def test_a_tracker_that_fails_at_finish_does_not_hide_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    finish = Tracker.finish
    monkeypatch.setattr(Tracker, "finish", lambda self, code=0: (codes.append(code), finish(self, code))[1])
    poison(monkeypatch, {0, 1})
    with pytest.raises(TrainingError):
        train(tiny_config(finetune__max_bad_steps=1), tmp_path)
    assert codes == [1]


def test_all_stages_are_in_one_wandb_run_and_a_changed_rate_is_on_record_twice(tmp_path: Path) -> None:
    config = tiny_config(
        stage=Stage.all, tracking__mode=TrackingMode.offline, finetune__steps=3, classifier__steps=4,
        classifier__log_every=2, calibration__measures=[Measure.softmax], calibration__grid_size=2,
        calibration__dev_rows=4, processes=1, data__split=SplitConfig(0.1, 0.4, 0.1),
    )  # fmt: skip
    assert train(config, tmp_path) == 0
    assert calm.load(tmp_path / "model").settings.has_classifier
    assert (tmp_path / "model/calibration/softmax-risk.json").is_file()
    config.resume, config.finetune.lr, config.finetune.steps = str(tmp_path), 5e-3, 4
    assert train(config, tmp_path) == 0

    records = offline_records(tmp_path)
    points = [record["history"]["item"] for record in records if record["type"] == "history"]
    steps = [point["train/global_step"] for point in points if "train/loss" in point]
    assert steps == [1, 2, 3, 4]
    assert any("classifier/validation_loss" in point for point in points)
    settings: dict[str, Any] = {}
    rates = []
    for record in records:
        update = record["config"]["update"] if record["type"] == "config" else {}
        settings.update(update)
        rates += [update["finetune/lr"]] if "finetune/lr" in update else []
    assert rates == [1e-2, 5e-3] and settings["classifier/lr"] == config.classifier.lr
    assert settings["events/resume/step-000003"]["changed"]["finetune.lr"] == {"old": 1e-2, "new": 5e-3}
    assert "calibration/tolerances" in settings
