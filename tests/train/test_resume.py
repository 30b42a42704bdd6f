"""Kill, damage, change: what a resumed run does. Loss curves are compared bit for bit."""

import json
import signal
from pathlib import Path

import pytest

from calm.checkpoint import verify_manifest
from calm.config import OptimizerName
from calm.errors import CheckpointError, ConfigError
from tests.train.tiny import curve, events, run_processes, scores, tiny_config, train_job
from train.run import train

POINTS = ["before_weights", "after_weights", "after_optimizer", "before_manifest", "before_rename", "after_rename"]
QUICK = ["before_weights", "before_rename", "after_rename"]
KILLED = -int(signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    assert train(tiny_config(), run_dir) == 0
    return run_dir


@pytest.fixture(scope="module")
def uninterrupted_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("pair")
    assert run_processes(2, train_job, tiny_config(), run_dir, log=run_dir / "log") == [0, 0]
    return run_dir


def assert_same_run(resumed: Path, whole: Path) -> None:
    assert len(curve(whole)) == 6 and curve(resumed) == curve(whole)
    assert len(scores(whole)) == 2 and scores(resumed) == scores(whole)
    weights = [run / "checkpoints/step-000006/model/model.safetensors" for run in (resumed, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    verify_manifest(resumed / "model")


def killed_and_resumed(processes: int, point: str, run_dir: Path) -> None:
    # the second save of the run is that of step 3, the best so far
    failpoint = {"CALM_FAILPOINT": f"ckpt.{point}:2"}
    codes = run_processes(processes, train_job, tiny_config(), run_dir, log=run_dir / "log", environment=failpoint)
    assert codes[0] == KILLED
    for left in (run_dir / "checkpoints").glob("step-*"):
        verify_manifest(left)
    config = tiny_config(resume=str(run_dir))
    if processes == 1:
        assert train(config, run_dir) == 0
    else:
        assert run_processes(processes, train_job, config, run_dir, log=run_dir / "log") == [0] * processes
    resumed = events(run_dir, "resume")
    assert [event["step"] for event in resumed] == [3 if point == "after_rename" else 2]


@pytest.mark.parametrize(
    "point", [point if point in QUICK else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
def test_killed_in_a_save_then_resumed_is_the_same_run(tmp_path: Path, point: str, uninterrupted: Path) -> None:
    killed_and_resumed(1, point, tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("point", ["after_weights"])
def test_killed_and_resumed_with_two_processes(tmp_path: Path, point: str, uninterrupted_pair: Path) -> None:
    killed_and_resumed(2, point, tmp_path)
    assert_same_run(tmp_path, uninterrupted_pair)


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in POINTS if point != "after_weights"])
def test_killed_and_resumed_with_two_processes_elsewhere(tmp_path: Path, point: str, uninterrupted_pair: Path) -> None:
    killed_and_resumed(2, point, tmp_path)
    assert_same_run(tmp_path, uninterrupted_pair)


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """A run killed in the save of step 4; checkpoints of steps 2 and 3 are whole."""
    failpoint = {"CALM_FAILPOINT": "ckpt.before_rename:3"}
    codes = run_processes(1, train_job, tiny_config(), tmp_path, log=tmp_path / "log", environment=failpoint)
    assert codes == [KILLED]
    return tmp_path


def test_a_damaged_checkpoint_is_passed_over_and_named(
    halfway: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = halfway / "checkpoints/step-000003/model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert train(tiny_config(resume=str(halfway)), halfway) == 0
    said = capsys.readouterr().err
    assert "skipped step-000003" in said and "model.safetensors: sha256 mismatch" in said
    assert "resuming from" in said and "step-000002" in said
    assert_same_run(halfway, uninterrupted)


def test_a_named_step_is_resumed_from_and_a_damaged_one_refused(halfway: Path, uninterrupted: Path) -> None:
    step = halfway / "checkpoints/step-000002"
    assert train(tiny_config(resume=str(step)), halfway) == 0
    assert_same_run(halfway, uninterrupted)
    (step / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="optimizer.safetensors has 0 bytes"):
        train(tiny_config(resume=str(step)), halfway)


def test_nothing_to_resume_is_an_error_except_for_auto(tmp_path: Path, uninterrupted: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume in"):
        train(tiny_config(resume=str(tmp_path)), tmp_path)
    assert train(tiny_config(resume="auto"), tmp_path) == 0
    assert curve(tmp_path) == curve(uninterrupted)
    assert train(tiny_config(resume="auto"), tmp_path) == 0  # all is done: nothing is trained again
    assert len([line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "train/loss" in line]) == 6


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", 1, "seed: 0 -> 1"),
        ("data__max_target_tokens", 9, "data.max_target_tokens: 8 -> 9"),
        ("model__shape__d_ff", 64, "model.shape.d_ff: 32 -> 64"),
        ("finetune__optimizer", OptimizerName.adafactor, "finetune.optimizer: adamw -> adafactor"),
        ("finetune__batch_size", 4, "finetune.batch_size: 8 -> 4"),
    ],
)
def test_a_change_that_makes_another_run_is_refused(uninterrupted: Path, key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match="allow_override=") as caught:
        train(tiny_config(resume=str(uninterrupted), **{key: value}), uninterrupted)
    assert said in str(caught.value)


def test_another_learning_rate_and_more_steps_are_allowed_and_recorded(halfway: Path) -> None:
    config = tiny_config(resume=str(halfway), finetune__lr=5e-3, finetune__steps=8)
    assert train(config, halfway) == 0
    assert sorted(curve(halfway)) == list(range(1, 9))
    changed = events(halfway, "resume")[0]["changed"]
    assert changed["finetune.lr"] == {"old": 1e-2, "new": 5e-3}
    state = json.loads((halfway / "checkpoints/step-000008/trainer_state.json").read_text())
    assert state["history"][0]["changed"]["finetune.steps"] == {"old": 6, "new": 8}
    assert state["settings"]["finetune"]["lr"] == 5e-3


def test_an_allowed_change_of_the_batch_begins_a_new_epoch(halfway: Path) -> None:
    config = tiny_config(resume=str(halfway), allow_override=["finetune.batch_size"], finetune__batch_size=4)
    assert train(config, halfway) == 0
    state = json.loads((halfway / "checkpoints/step-000006/trainer_state.json").read_text())
    assert state["position"] == {"epoch": 1, "batch": 3}


def test_more_processes_keep_the_global_batch(halfway: Path, uninterrupted: Path) -> None:
    with pytest.raises(ConfigError, match="must be divisible"):
        train(tiny_config(resume=str(halfway), finetune__accumulation=3), halfway)
    config = tiny_config(resume=str(halfway))
    assert run_processes(2, train_job, config, halfway, log=halfway / "log") == [0, 0]
    file = "checkpoints/step-000006/trainer_state.json"
    whole, resumed = (json.loads((run / file).read_text()) for run in (uninterrupted, halfway))
    assert (resumed["position"], resumed["tokens"]) == (whole["position"], whole["tokens"])
