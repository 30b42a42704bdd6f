"""Kill, damage, change: what a resumed run does. Loss curves are compared bit for bit."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import calm
from calm.checkpoint import verify_manifest, write_manifest
from calm.config import OptimizerName, Precision, Stage
from calm.errors import CheckpointError, ConfigError
from calm.models.folder import save
from tests.train.tiny import curve, events, run_processes, scores, tiny_config, train_job
from train import loop as loop_module
from train.run import train
from train.state import Best, TrainerState, discard, folder_of, point, rotate, steps_in

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


def fake_steps(run_dir: Path, *steps: int, damaged: tuple[int, ...] = ()) -> Path:
    for step in steps:
        folder = folder_of(run_dir, step)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(step))
        write_manifest(folder)
        if step in damaged:
            (folder / "weights").write_text("?")
    return run_dir


def left(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())


def names(*steps: int) -> list[str]:
    return [folder_of(Path(), step).name for step in steps]


@pytest.mark.parametrize(
    ("state", "keep", "damaged", "kept"),
    [
        (TrainerState(step=500), 2, (), (400, 500)),
        (TrainerState(step=500, best=Best(100, 0.5)), 1, (), (100, 500)),
        (TrainerState(step=200), 1, (), (200, 400, 500)),  # of another branch: not counted, not its to delete
        (TrainerState(step=500), 1, (500,), (400, 500)),
        (TrainerState(step=500), 2, (400,), (200, 400, 500)),
        (TrainerState(step=500), 9, (500,), (100, 200, 400, 500)),
    ],
)
def test_rotation_counts_whole_checkpoints_up_to_its_step(
    tmp_path: Path, state: TrainerState, keep: int, damaged: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    rotate(fake_steps(tmp_path, 100, 200, 400, 500, damaged=damaged), state, keep, set())
    assert left(tmp_path) == names(*kept)


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    fake_steps(tmp_path, 999_999, 1_000_000, 5)
    (tmp_path / "checkpoints/step-000007.copy").mkdir()
    assert [path.name for path in steps_in(tmp_path)] == names(1_000_000, 999_999, 5)


def test_a_left_branch_is_removed_and_best_names_what_is_there(tmp_path: Path) -> None:
    run_dir = fake_steps(tmp_path, 100, 200, 400, 500)
    point(run_dir, "best", folder_of(run_dir, 400))
    abandoned = [folder_of(run_dir, step) for step in (500, 400, 200)]
    state = TrainerState(step=200, best=Best(100, 0.5))  # 200 was just written in the place of the old one
    assert discard(run_dir, abandoned, state) == names(500, 400)
    assert left(run_dir) == names(100, 200)
    assert (run_dir / "checkpoints/best").read_text() == "step-000100\n"


def test_going_on_from_an_older_step_leaves_no_other_branch(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    assert left(run_dir) == names(2, 3, 4, 6)
    seen: list[list[str]] = []
    write = loop_module.save_checkpoint

    def spy(*arguments: Any) -> Path:
        seen.append(left(run_dir))
        return write(*arguments)

    monkeypatch.setattr(loop_module, "save_checkpoint", spy)
    step = folder_of(run_dir, 2)
    config = tiny_config(resume=str(step), finetune__steps=5, finetune__eval_every=5, finetune__keep=1)
    assert train(config, run_dir) == 0
    assert seen == [names(2, 3, 4, 6), names(4)]  # nothing is lost before the first new one is there
    assert "removed step-000006, step-000003: the run went on from an earlier step" in capsys.readouterr().err
    assert left(run_dir) == names(5)
    config = tiny_config(resume="auto", finetune__steps=5, finetune__eval_every=5)
    assert train(config, run_dir) == 0
    assert f"resuming from {folder_of(run_dir, 5)}" in capsys.readouterr().err


def test_a_best_model_that_is_gone_is_sought_anew(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    shutil.rmtree(folder_of(run_dir, 3))
    (run_dir / "stages.json").unlink()
    state = json.loads((folder_of(run_dir, 4) / "trainer_state.json").read_text())
    assert state["best"]["step"] == 3
    assert train(tiny_config(resume=str(folder_of(run_dir, 4))), run_dir) == 0
    assert "of step 3, is gone or damaged" in capsys.readouterr().err
    assert (run_dir / "checkpoints/best").read_text() == "step-000006\n"
    verify_manifest(run_dir / "model")


def test_a_step_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = loop_module.save_checkpoint

    def spy(*arguments: Any) -> Path:
        written.append(arguments[4].step)
        return write(*arguments)

    monkeypatch.setattr(loop_module, "save_checkpoint", spy)
    scored = iter([0.1, 0.2, 0.3])  # each validation is the best so far
    monkeypatch.setattr(loop_module, "evaluate", lambda *_: next(scored))
    assert train(tiny_config(finetune__eval_every=2), tmp_path) == 0
    assert written == [2, 4, 6]


def output_dtype(run_dir: Path) -> str:
    return str(json.loads((run_dir / "model/config.json").read_text())["dtype"])


def test_another_store_or_exits_on_resume_write_the_model_again(uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    assert output_dtype(run_dir) == "float32"
    config = tiny_config(resume=str(run_dir), store=Precision.bf16, exit_layers=[2], allow_override=["exit_layers"])
    assert train(config, run_dir) == 0
    assert output_dtype(run_dir) == "bfloat16" and calm.load(run_dir / "model").settings.exit_layers == [2]
    assert len(curve(run_dir)) == 6  # nothing was trained again


def test_the_classifier_of_a_resumed_run_is_that_of_its_best_model(uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    best = calm.load(run_dir / "model").hf.state_dict()
    trained = {"stage": Stage.classifier, "resume": str(run_dir), "classifier__steps": 2, "classifier__eval_rows": 4}
    for name in ("model", "checkpoints/step-000006/model"):  # the newest is made to differ from the best
        assert (run_dir / name).is_dir()
    newest = calm.load(run_dir / "checkpoints/step-000006/model")
    newest.hf.shared.weight.data.add_(1.0)
    save(newest, run_dir / "checkpoints/step-000006/model")
    write_manifest(run_dir / "checkpoints/step-000006")
    assert train(tiny_config(**trained), run_dir) == 0
    model = calm.load(run_dir / "model")
    assert model.settings.has_classifier
    assert all(torch.equal(value, best[name]) for name, value in model.hf.state_dict().items())
    (run_dir / "stages.json").unlink()
    with pytest.raises(ConfigError, match=r"finetune is not done there .* checkpoint=.*/run/model without resume="):
        train(tiny_config(**trained), run_dir)
