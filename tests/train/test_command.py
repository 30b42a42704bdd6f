"""The commands as users type them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calm.checkpoint import verify_manifest
from calm.tracking import read_metrics
from tests.conftest import RunProgram
from tests.train.tiny import curve, events

TINY = """
+model=tiny data=restaurants data.size=200 data.max_source_tokens=16 data.max_target_tokens=8 data.split.dev=0.1
model.shape.vocab_size=100 model.shape.d_model=16 model.shape.d_kv=8 model.shape.num_heads=2 model.shape.d_ff=32
model.shape.num_decoder_layers=3 device=cpu precision=fp32 finetune.steps=6 finetune.batch_size=8 finetune.log_every=1
finetune.eval_every=6 finetune.eval_rows=4 finetune.save_every=2 finetune.warmup_steps=2 tracking.mode=disabled
classifier.steps=5 calibration.grid_size=3 calibration.dev_rows=10 calibration.measures=[softmax,classifier]
""".split()


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs/train").iterdir()
    return run


def test_by_default_one_process_per_core_shares_one_run_folder(run_program: RunProgram, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('a train.py of the user was taken for ours')")
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-m", "train", *TINY, "stage=finetune", "processes=2"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    run = only_run(tmp_path)
    assert sorted(curve(run)) == [1, 2, 3, 4, 5, 6]
    verify_manifest(run / "model")
    assert ran.stderr.count("2 process(es) on cpu, fp32") == 1 and ran.stderr.count("corpus restaurants") == 1
    assert json.loads((run / "run.json").read_text())["environment"]["processes"] == 2


@pytest.mark.slow
def test_all_stages_then_certificates_beside_the_weights(run_program: RunProgram, tmp_path: Path) -> None:
    ran = run_program("train", *TINY, "processes=2")
    assert ran.returncode == 0, ran.stderr
    run = only_run(tmp_path)
    assert [event["stage"] for event in events(run, "stage")] == ["finetune", "classifier", "calibrate"]
    assert {path.name for path in (run / "model/calibration").glob("*.json")} == {
        "softmax-risk.json",
        "classifier-risk.json",
    }
    again = run_program("train", f"resume={run}")
    assert again.returncode == 0, again.stderr
    assert len([record for record in read_metrics(run) if "train/loss" in record]) == 6
    alone = run_program("train", "stage=calibrate", f"checkpoint={run / 'model'}", "calibration.measures=[softmax]")
    assert alone.returncode == 0, alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_leaves(
    run_program: RunProgram, tmp_path: Path, signum: int, status: int
) -> None:
    command = [sys.executable, "-m", "train", *TINY, "stage=finetune", "processes=2", "finetune.steps=3000"]
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=tmp_path, stderr=said)
        metrics = tmp_path / "runs/train"
        while not [
            line for path in metrics.glob("*/metrics.jsonl") for line in [path.read_text()] if "train/loss" in line
        ]:
            assert process.poll() is None, (tmp_path / "said").read_text()
            os.sched_yield()
        process.send_signal(signum)
        assert process.wait(120) == status, (tmp_path / "said").read_text()
    run = only_run(tmp_path)
    stopped = max(curve(run))
    verify_manifest(run / f"checkpoints/step-{stopped:06d}")
    again = run_program("train", f"resume={run}", f"finetune.steps={stopped + 2}")
    assert again.returncode == 0, again.stderr
    assert sorted(curve(run)) == list(range(1, stopped + 3))


@pytest.mark.slow
def test_accelerate_starts_the_processes_too(tmp_path: Path) -> None:
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launcher = [accelerate, "launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command = [*launcher, "--num_cpu_threads_per_process", "1", "-m", "train", *TINY, "stage=finetune"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=240)
    assert ran.returncode == 0, ran.stderr
    run = only_run(tmp_path)
    assert sorted(curve(run)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "run.json").read_text())["environment"]["processes"] == 2


def test_model_and_checkpoint_together_are_refused(run_program: RunProgram) -> None:
    ran = run_program("train", "+model=tiny", "checkpoint=somewhere")
    assert ran.returncode == 1 and "exclude each other" in ran.stderr and len(ran.stderr.splitlines()) == 1
