"""metrics.jsonl is the truth and must be whole; W&B is a view and may fail in any way without stopping a run."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calm.checkpoint import finite
from calm.config import TrackingConfig, TrackingMode
from calm.errors import TrainingError
from calm.tracking import STEP, Tracker, has_api_key, read_metrics, wandb_mode

OFFLINE = TrackingConfig(mode=TrackingMode.offline)
DISABLED = TrackingConfig(mode=TrackingMode.disabled)


def offline_records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of all offline files of a run, read back by W&B's own reader."""
    records = []
    for folder in sorted((run_dir / "wandb").glob("offline-run-*")):
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        records += [json.loads(line) for line in told.stdout.splitlines()]
    return records


def test_every_line_is_json_and_nothing_infinite_reads_as_finite(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, DISABLED, "train")
    tracker.log({"train/loss": math.nan, "lr": 0.1}, 1)
    tracker.log({"train/loss": math.inf}, 2)
    tracker.event("bad_step", 2, rows=["a"], loss=math.nan)
    tracker.finish()
    start, first, second, event = read_metrics(tmp_path)
    assert start["event"] == "start" and start["job_type"] == "train"
    assert first["train/loss"] is None and first["lr"] == 0.1 and second["train/loss"] is None
    assert event["rows"] == ["a"] and event["loss"] is None and event["step"] == 2
    assert finite({"a": [math.inf, 1.0]}) == {"a": [None, 1.0]}
    assert not (tmp_path / "wandb").exists()


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    Tracker(tmp_path, DISABLED, "train").log({"x": 1.0}, 1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "x"')
    assert [record.get("x") for record in read_metrics(tmp_path)] == [None, 1.0]


def test_a_vanished_or_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    tracker = Tracker(run_dir, DISABLED, "train")
    shutil.rmtree(run_dir)
    with pytest.raises(TrainingError, match=r"metrics.jsonl: No such file or directory. The run stops"):
        tracker.log({"x": 1.0}, 1)
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match="Is a directory"):
        tracker.event("x")


def test_stages_of_one_run_and_a_resume_are_all_on_record(tmp_path: Path) -> None:
    first = Tracker(tmp_path, OFFLINE, "train", {"seed": 1, "finetune": {"lr": 0.1}})
    for stage, lr in (("finetune", 0.1), ("classifier", 0.5)):
        first.settings(stage, {"stage": stage, "lr": lr, "dataset": "restaurants"})
        first.log({f"{stage}/loss": 2.0, "lr": lr}, 1)
    first.finish()
    again = Tracker(tmp_path, OFFLINE, "train", {"seed": 1, "finetune": {"lr": 0.2}})
    again.event("resume", 1, changed={"finetune.lr": {"old": 0.1, "new": 0.2}})
    again.settings("finetune", {"lr": 0.2})
    again.log({"finetune/loss": 1.0, "lr": 0.2}, 1)  # a step that the first part had, too
    again.finish()

    records = offline_records(tmp_path)
    points = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [point.get("finetune/loss") for point in points if "finetune/loss" in point] == [2.0, 1.0]
    assert [point.get("classifier/loss") for point in points if "classifier/loss" in point] == [2.0]
    assert [(point[STEP], point["lr"]) for point in points] == [(1, 0.1), (1, 0.5), (1, 0.2)]
    settings: dict[str, Any] = {}
    for record in records:
        settings.update(record["config"]["update"] if record["type"] == "config" else {})
    assert settings["events/resume/step-000001"]["changed"] == {"finetune.lr": {"old": 0.1, "new": 0.2}}
    assert settings["classifier/lr"] == 0.5
    ids = {record["run"]["run_id"] for record in records if record["type"] == "run"}
    assert ids == {json.loads((tmp_path / "wandb.json").read_text())["id"]}


def test_online_without_a_key_goes_on_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    tracker = Tracker(tmp_path, TrackingConfig(mode=TrackingMode.online), "train")
    tracker.log({"x": 1.0}, 1)
    tracker.finish()
    assert "W&B start failed" in caplog.text and "the run goes on" in caplog.text
    assert read_metrics(tmp_path)[-1]["x"] == 1.0


def test_wandb_in_a_folder_that_cannot_be_written_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("no folder")
    tracker = Tracker(tmp_path, OFFLINE, "train")
    tracker.log({"x": 1.0}, 1)
    tracker.finish()
    assert read_metrics(tmp_path)[-1]["x"] == 1.0


class Broken:
    """A W&B run whose service is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, _: object) -> None:
        self.calls += 1
        raise BrokenPipeError("service gone")

    def finish(self, exit_code: int) -> None:
        raise BrokenPipeError("service gone")


def test_a_service_that_dies_is_left_alone_and_metrics_are_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(tmp_path, DISABLED, "train")
    tracker._run = broken = Broken()
    for step in range(3):
        tracker.log({"x": float(step)}, step)
    tracker.finish()
    assert broken.calls == 1 and caplog.text.count("W&B log failed (service gone)") == 1
    assert [record["x"] for record in read_metrics(tmp_path)[1:]] == [0.0, 1.0, 2.0]
    other = Tracker(tmp_path, DISABLED, "train")
    other._run = Broken()
    other.finish()
    assert "W&B finish failed" in caplog.text


KILLED_SERVICE = """
import os, signal, subprocess, sys
from calm.config import TrackingConfig, TrackingMode
from calm.tracking import Tracker
tracker = Tracker(sys.argv[1], TrackingConfig(TrackingMode.offline), "train")
tracker.log({"x": 0.0}, 0)
for line in subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines():
    pid, parent, words = line.split(None, 2)
    if parent == str(os.getpid()) and "wandb-core" in words:
        os.kill(int(pid), signal.SIGKILL)
        print("killed")
for step in range(1, 4):
    tracker.log({"x": float(step)}, step)
tracker.finish()
print("went on")
"""


@pytest.mark.slow
def test_killing_wandbs_process_does_not_end_the_run(tmp_path: Path) -> None:
    # this process may have a service of its own, which a child would use
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", KILLED_SERVICE, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env=own)
    assert ran.returncode == 0 and "killed" in ran.stdout and "went on" in ran.stdout, ran.stderr
    assert [record["x"] for record in read_metrics(tmp_path)[1:]] == [0.0, 1.0, 2.0, 3.0]


def test_auto_is_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert TrackingConfig().mode is TrackingMode.auto
    assert not has_api_key() and wandb_mode(TrackingMode.auto) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_api_key() and wandb_mode(TrackingMode.auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(TrackingMode.online) == "offline" and wandb_mode(TrackingMode.disabled) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode(TrackingMode.offline) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode(TrackingMode.auto) == "online"
