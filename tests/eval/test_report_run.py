"""The runner of a report: a ledger, failures that stop nobody, limits, and going on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from calm.config import TrackingConfig, TrackingMode
from calm.errors import ConfigError
from calm.experiment_config import ReportConfig
from calm.tracking import read_metrics
from eval.experiment import UNFINISHED
from eval.report import __main__ as program
from eval.report import experiments
from eval.report.experiments import Experiment, chosen
from eval.report.runner import Runs, Step, last_line
from eval.report.tracked import track

UNTRACKED = TrackingConfig(TrackingMode.disabled)

QUICK = """
import json, os, pathlib, sys, time
settings = dict(each.split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(settings["hydra.run.dir"])
with open(folder / "ran.txt", "a") as file:
    file.write(f"{os.getpid()}\\n")
print("beginning", flush=True)
if settings.get("how") == "fails":
    sys.exit("error: <no> luck")
if settings.get("how") == "half":
    text = {"program": "fake_quick", "failed": {"trial": "too big"}, "rows": []}
    (folder / "summary.json").write_text(json.dumps(text))
    sys.exit(5)
time.sleep(float(settings.get("seconds", 0)))
(folder / "summary.json").write_text(json.dumps({"program": "fake_quick", "rows": [], "settings": settings}))
"""
RUN = """
import sys
from pathlib import Path
from eval.report.runner import Runs, Step
folder = Path(sys.argv[1])
runs = Runs(folder)
for name, seconds in (("first", 0), ("second", sys.argv[2])):
    runs.run(Step(name, "fake_quick", (f"seconds={seconds}",), folder / name), None)
"""


@pytest.fixture(autouse=True)
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "fake_quick.py").write_text(QUICK)
    path = os.pathsep.join([str(modules), str(Path(__file__).parents[2])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(modules)


def fake(number: int, name: str, **more: Any) -> Experiment:
    return Experiment(number, name, f"Title {name}", f"Question of {name}?", (), module="fake_quick", **more)


def ran(folder: Path) -> int:
    return len((folder / "ran.txt").read_text().split())


def test_what_is_done_is_not_run_again_unless_something_changed(tmp_path: Path) -> None:
    runs, folder = Runs(tmp_path), tmp_path / "one"
    for times, step in (
        (1, Step("one", "fake_quick", (), folder)),
        (1, Step("one", "fake_quick", (), folder)),
        (2, Step("one", "fake_quick", ("a=1",), folder)),
        (3, Step("one", "fake_quick", ("a=1",), folder, about="other weights")),
    ):
        assert runs.run(step, None).state == "done"
        assert ran(folder) == times
    assert "beginning" in (folder / "log.txt").read_text()
    (folder / "summary.json").unlink()
    assert runs.run(Step("one", "fake_quick", ("a=1",), folder, about="other weights"), None).state == "done"
    assert ran(folder) == 4


def test_a_failure_says_why_and_is_tried_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for how, why in (("fails", "error: <no> luck"), ("half", "1 of its trials failed, trial: too big")):
        step = Step(how, "fake_quick", (f"how={how}",), tmp_path / how)
        ended = runs.run(step, None)
        assert (ended.state, ended.why) == ("failed", why) and not runs.is_done(step)
        assert runs.run(step, None).state == "failed" and ran(tmp_path / how) == 2
    slow = Step("slow", "fake_quick", ("seconds=60",), tmp_path / "slow")
    assert runs.run(slow, 0.01).why == "stopped after 0.01 minutes; call again to go on"
    assert last_line(tmp_path / "slow" / "log.txt") == "beginning" or not (tmp_path / "slow" / "ran.txt").exists()


def started(folder: Path, seconds: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), str(seconds)])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_takes_its_child_along_and_goes_on(tmp_path: Path, signum: signal.Signals) -> None:
    runner = started(tmp_path, 60)
    told = tmp_path / "second" / "ran.txt"
    wait_for(lambda: told.is_file() and told.read_text().endswith("\n"))
    child = int(told.read_text())
    runner.send_signal(signum)
    runner.wait(30)
    wait_for(lambda: not alive(child))
    assert Runs(tmp_path).ended("second", tmp_path / "second").state == "running"
    runs = Runs(tmp_path)
    for name, seconds in (("first", 0), ("second", 60)):
        step = Step(name, "fake_quick", (f"seconds={seconds}",), tmp_path / name)
        assert runs.is_done(step) == (name == "first")
        assert runs.run(step, 0.01).state == ("done" if name == "first" else "failed")
    assert ran(tmp_path / "first") == 1 and ran(tmp_path / "second") == 2


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_report_of_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that works, one that fails, one that needs trainings, one that this version has not."""
    monkeypatch.chdir(tmp_path)
    list_of = (
        fake(1, "good"), fake(2, "bad"), fake(3, "trained", trains=True),
        Experiment(4, "later", "Later", "Is it later?"),
    )  # fmt: skip
    monkeypatch.setattr(experiments, "EXPERIMENTS", list_of)
    (tmp_path / "<model>").mkdir()
    config = ReportConfig("<model>", overrides={"bad": ["how=fails"], "good": ["seconds=0"]}, tracking=UNTRACKED)
    run_dir = tmp_path / "run"
    assert program.run(config, run_dir) == UNFINISHED
    summary = json.loads((run_dir / "summary.json").read_text())
    states = {name: each["state"] for name, each in summary["experiments"].items()}
    assert states == {"good": "done", "bad": "failed", "trained": "missing", "later": "missing"}
    unknown = " ".join(summary["answer"])
    assert "Question of bad? Experiment bad is failed: error: <no> luck. To run it: python -m fake_quick" in unknown
    assert "Experiment trained is missing: it needs trainings of its own" in unknown
    assert "python -m eval.later 'checkpoint=<model>' hydra.run.dir=run/later" in unknown
    page = (run_dir / "report.html").read_text()
    assert "<h1>Early exit: &lt;model&gt;</h1>" in page and "<no>" not in page and "<model>" not in page
    made = tmp_path / "elsewhere" / "trained"
    made.mkdir(parents=True)
    (made / "summary.json").write_text(json.dumps({"program": "fake_quick", "rows": [], "checkpoint": "another"}))
    config = ReportConfig(
        "<model>", skip=["bad", "later"], found=[str(tmp_path / "elsewhere" / "trained")], tracking=UNTRACKED
    )
    assert program.run(config, run_dir) == 0
    again = json.loads((run_dir / "summary.json").read_text())["experiments"]
    assert again["trained"]["state"] == "done" and again["trained"]["flags"] == ["of another model folder: another"]
    assert ran(run_dir / "good") == 2  # its settings have changed
    capsys.readouterr()


def test_what_cannot_be_asked_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only: 'nobody' is no experiment; there are backfill"):
        chosen(["nobody"], [])
    with pytest.raises(ConfigError, match="leave no experiment"):
        chosen(["length"], ["length"])
    with pytest.raises(ConfigError, match="minutes"):
        ReportConfig(minutes=0.0)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="holds no summary.json and records.parquet of eval.table1"):
        program.run(ReportConfig(str(tmp_path / "model"), records=str(tmp_path)), tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no folder"):
        program.run(ReportConfig(str(tmp_path / "model"), found=["nowhere"]), tmp_path / "run")


def test_records_are_those_above_the_checkpoint_or_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from calm.config import DataConfig
    from eval.report.plan import Plan

    monkeypatch.chdir(tmp_path)
    (tmp_path / "made" / "model").mkdir(parents=True)
    model, run_dir = Path("made/model"), tmp_path / "run"
    assert Plan(ReportConfig(), model, run_dir, ()).records == Path("run/table1")
    (tmp_path / "made" / "summary.json").write_text(json.dumps({"table1": []}))
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "made" / "records.parquet")
    plan = Plan(ReportConfig(overrides={"length": ["fewest=9"]}), model, run_dir, ("data=debian",))
    assert plan.records == Path("made") and plan.has_records
    by = {each.name: plan.step(each) for each in experiments.EXPERIMENTS}
    assert by["length"].argv == ("checkpoint=made/model", "records=made", "fewest=9")
    assert by["backfill"].argv == ("checkpoint=made/model", "data=debian")
    assert by["slowest_row"].command == "python -m eval.slowest_row records=made hydra.run.dir=run/slowest_row"
    other = Plan(ReportConfig(data=DataConfig("pydoc")), model, run_dir, ("data=pydoc",))
    assert other.records == Path("run/table1") and not other.has_records  # those above are of another corpus
    assert other.table1().argv == ("checkpoint=made/model", "data=pydoc")


def test_a_report_is_made_of_a_model_and_its_certificates(certified: Path, tmp_path: Path) -> None:
    found = {"length": {"seconds": 3.0, "state": "done", "said": ["Long ones skip more."]}}
    summary = {"checkpoint": str(certified / "model"), "config": {}, "experiments": found, "worth": "yes", "answer": []}
    (tmp_path / "report.html").write_text("<p>yes</p>")
    track(UNTRACKED, tmp_path, summary)
    records = read_metrics(tmp_path)
    (values,) = [record for record in records if "report/done" in record]
    assert values["report/done"] == 1 and values["report/length/seconds"] == 3.0
    events = [record for record in records if record.get("event") in ("used", "made")]
    assert [event["type"] for event in events] == ["model", "calibration", "calibration", "calibration", "report"]
