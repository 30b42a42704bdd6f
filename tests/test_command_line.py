"""What users type: awkward texts reach the program as typed, and each mistake is answered by one clear line."""

import ast
import json
import os
from pathlib import Path

import pytest

from calm import run_dir
from calm.cli import settings
from calm.cli_errors import one_line
from calm.config import CalibrateConfig, Table1Config, TrainConfig
from calm.errors import ConfigError
from calm.overrides import Override, quoted, readable, split, text_of

from .conftest import RunProgram

AWKWARD = [
    "runs/a=1/step=20",
    "/data/Übersicht/x.jsonl",
    "~/x.jsonl",
    "x[1].jsonl",
    "my data/x (1).jsonl",
    "a&b.jsonl",
    "x#1.jsonl",
    "a,b.jsonl",
    "$HOME/x",
    "summarize: ",
    " leading",
    "1e3",
    "007",
    "true",
    "it's.jsonl",
    'say "x".jsonl',
    "{a: 1}",
    "[a,b]",
    "range(1,3)",
    "back\\slash.jsonl",
    "ends in \\",
    "日本語 🙂.jsonl",
    "a:b;c!d",
    "--x",
    "tab\there",
]


def train(*argv: str) -> TrainConfig:
    return settings("train", TrainConfig, ["+model=tiny", *argv])


@pytest.mark.parametrize("text", AWKWARD)
def test_texts_reach_the_program_as_typed_and_paths_with_the_home_folder(text: str) -> None:
    config = train(f"data.source_prefix={text}", f"model.name={text}", f"data.path={text}")
    assert config.model is not None
    assert (config.data.source_prefix, config.model.name) == (text, text)
    assert config.data.path == os.path.expanduser(text)


@pytest.mark.parametrize("text", ["'a b'", '"a b"', "a\\ b"])
def test_texts_already_quoted_in_hydras_way_still_mean_the_same(text: str) -> None:
    assert train(f"data.path={text}").data.path == "a b"


def test_null_empty_and_interpolated_texts_keep_their_meaning() -> None:
    assert train("data.path=null").data.path is None
    assert train("tracking.group=NULL").tracking.group is None
    assert train("data.source_prefix=").data.source_prefix == ""
    assert train("data.path=${data.name}/x").data.path == "restaurants/x"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("[a=1,b]", ["a=1", "b"]),
        ("[full, static=4, tolerance=0.05]", ["full", "static=4", "tolerance=0.05"]),
        ("['a=1','b, c']", ["a=1", "b, c"]),
        ('["a=1",b]', ["a=1", "b"]),
        ("[a (1),é]", ["a (1)", "é"]),
        ("[]", []),
    ],
)
def test_lists_of_texts_are_read_as_typed(typed: str, meant: list[str]) -> None:
    assert train(f"tracking.tags={typed}").tracking.tags == meant


def test_numbers_lists_choices_and_dictionaries_are_left_to_hydra() -> None:
    config = train("finetune.lr=1e-4", "exit_layers=[2,4]", "finetune.loss=uniform", "tracking.tags=[a,b c]", "seed=3")
    assert (config.finetune.lr, config.exit_layers, config.finetune.loss.value) == (1e-4, [2, 4], "uniform")
    assert (config.tracking.tags, config.seed) == (["a", "b c"], 3)
    given = settings("table1", Table1Config, ["given.entropy=.5"]).given
    assert given["entropy"] == 0.5
    assert settings("calibrate", CalibrateConfig, ["calibration.measures=[state]"]).calibration.measures == ["state"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], ["no model chosen", "+model=NAME", "base, large, small, tiny", "checkpoint="]),
        (["model=tiny"], ["+model=tiny"]),
        (["+model=tinny"], ["model=tinny", "choose from", "small, tiny"]),
        (["+model=tiny", "data=debain"], ["data=debain", "choose from", "debian"]),
        (["+model=tiny", "finetune.lrr=1"], ["finetune.lrr", "did you mean finetune.lr"]),
        (["+model=tiny", "+finetune.lrr=1"], ["finetune.lrr", "did you mean finetune.lr"]),
        (["+model=tiny", "steps=5"], ["steps", "finetune.steps"]),
        (["+model=tiny", "modle.shape.d_model=5"], ["modle.shape.d_model", "model.shape.d_model"]),
        (["+model=tiny", "finetune.lr=fast"], ["finetune.lr=fast", "Float"]),
        (["+model=tiny", "finetune.steps=1.5"], ["finetune.steps=1.5", "Integer"]),
        (["+model=tiny", "finetune.loss=best"], ["finetune.loss=best", "weighted, uniform"]),
        (["+model=tiny", "finetune.lr=-1"], ["finetune.lr", "(0, inf)", "-1"]),
        (["+model=tiny", "calibration.error_prob=nan"], ["calibration.error_prob", "(0, 1)", "nan"]),
        (["+model=tiny", "exit_layers=[3,2]"], ["exit_layers", "ascending", "[3, 2]"]),
        (["+model=tiny", "precision=fp16"], ["fp16", "65504", "bf16"]),
        (["+model=tiny", "seed=null"], ["seed"]),
        (["+model=tiny", "exit_layers=[1"], ["exit_layers=[1"]),
        (["+model=tiny", "calibration.measures=softmax,state"], ["calibration.measures=[softmax,state]", "-m"]),
        (["tiny"], ["'tiny'", "key=value"]),
        (["--lr", "3"], ["--lr", "key=value"]),
        (["checkpoint="], ["checkpoint=", "empty"]),
        (["+model=tiny", "hydra.run.dri=x"], ["hydra.run.dri"]),
        (["+model=tiny", "data.path=${nope}"], ["data.path", "nope"]),
        (["+model=tiny", "checkpoint=x"], ["+model=tiny", "checkpoint=x", "exclude each other"]),
        (["+model=small", "model.shape.d_model=5"], ["null"]),
        (["+experiment=demo", "+model=small"], ["model=NAME, without +"]),
        (["checkpoint=no/such"], ["checkpoint=no/such", "no such folder"]),
        (["resume=no/such"], ["resume=no/such", "no such folder"]),
        (["--config-dir", "no/such", "+model=mine"], ["--config-dir", "no/such", "no such folder"]),
    ],
)
def test_each_mistake_is_one_line_that_says_what_and_where(argv: list[str], said: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which kind is Hydra's business; the line is ours)
        settings("train", TrainConfig, argv)
    line = one_line(caught.value)
    assert line is not None and "\n" not in line and len(line) < 400
    for words in said:
        assert words in line


def test_errors_of_the_program_itself_are_no_users_errors() -> None:
    assert one_line(ZeroDivisionError("x")) is None
    assert one_line(AssertionError("x")) is None
    assert one_line(OSError("no number")) is None
    assert one_line(ConfigError("a\n  b")) == "a b"
    assert one_line(FileNotFoundError(2, "No such file or directory", "x.txt")) == "x.txt: No such file or directory"
    assert one_line(OSError(28, "No space left on device")) == "the disk is full"


def test_a_comma_starts_a_sweep_only_after_m() -> None:
    assert readable(["data.path=a,b"], TrainConfig, sweep=False) == ["data.path='a,b'"]
    assert readable(["data.path=a,b"], TrainConfig, sweep=True) == ["data.path=a,b"]
    assert readable(["data.path=a b (1)"], TrainConfig, sweep=True) == ["data.path='a b (1)'"]
    with pytest.raises(ConfigError, match=r"""'data.path="a \(1\)","b"'"""):
        readable(["data.path=a (1),b"], TrainConfig, sweep=True)


def test_options_may_stand_anywhere_and_keep_their_values() -> None:
    argv = ["+model=tiny", "-m", "seed=1,2", "--config-dir", "a=b", "--config-dir=c=d", "--cfg", "job", "data=x"]
    options, overrides = split(argv)
    assert options == ["-m", "--config-dir", "a=b", "--config-dir", "c=d", "--cfg", "job"]
    assert overrides == ["+model=tiny", "seed=1,2", "data=x"]


@pytest.mark.parametrize("text", AWKWARD)
def test_quoting_is_undone_by_hydra(text: str) -> None:
    for mark in ("single", "double"):
        assert text_of(Override("", "x", quoted(text, mark))) == text


def test_resume_brings_the_runs_own_settings_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a=1, b"
    (folder / "checkpoints" / "step-20").mkdir(parents=True)
    before = ["+model=tiny", "data=debian", "finetune.steps=7", "finetune.lr=0.5"]
    (folder / "overrides.json").write_text(json.dumps(before))
    for target in (folder, folder / "checkpoints" / "step-20"):
        config = settings("train", TrainConfig, [f"resume={target}", "finetune.lr=0.25"])
        assert config.model is not None and (config.model.name, config.data.name) == ("tiny", "debian")
        assert (config.finetune.steps, config.finetune.lr, config.resume) == (7, 0.25, str(target))


def test_run_folders_are_new_and_easy_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CALM_RUN_DIR", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    names = set()
    for _ in range(5):
        run_dir.forget_run_dir()
        name = run_dir.run_dir("train")
        assert run_dir.run_dir("train") == name and Path(name).is_dir()
        assert name.startswith("runs/train/") and not set(name) & set("=, ()[]'\"")
        names.add(name)
    assert len(names) == 5
    run_dir.forget_run_dir()
    assert not Path(run_dir.run_dir("train", create=False)).exists()
    monkeypatch.setenv("CALM_RUN_DIR", "given")
    assert run_dir.run_dir("train") == "given"


def test_processes_started_side_by_side_share_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CALM_RUN_DIR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run_dir.forget_run_dir()
        names.append(run_dir.run_dir("train"))
        assert run_dir.is_first_process() == (rank == "0")
    run_dir.forget_run_dir()
    assert names[0] == names[1] and Path(names[0]).is_dir()


def test_bare_train_lists_the_models_and_leaves_nothing_behind(run_program: RunProgram, tmp_path: Path) -> None:
    done = run_program("train")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "tiny" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(run_program: RunProgram) -> None:
    done = run_program("train", "+model=tiny", "finetune.lr=-1", env={"CALM_DEBUG": "1"})
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_cfg_job_prints_the_settings_and_help_the_choices(run_program: RunProgram, tmp_path: Path) -> None:
    import yaml

    done = run_program("train", "--cfg", "job", "+model=tiny", "data.path=my data/x (1).jsonl", "resume=auto")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["model"]["name"], shown["data"]["path"]) == ("tiny", "my data/x (1).jsonl")
    helped = run_program("train", "--help")
    assert helped.returncode == 0 and "tiny" in helped.stdout
    assert list(tmp_path.iterdir()) == []


PROBE = """
from calm.cli import job_overrides, program
from calm.config import TrainConfig
def run(config, folder):
    print(config.finetune.lr, config.data.path, config.model.name, folder.is_dir(), folder.name)
    print(job_overrides())
program("train", TrainConfig, run)()
"""


def test_a_sweep_goes_on_after_a_job_that_fails(run_program: RunProgram, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    done = run_program("probe", "+model=tiny", "-m", "finetune.lr=-1,0.5", "data.path=a b")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "0.5 a b tiny True 1"
    assert "error: finetune.lr must lie in" in done.stderr and "1 of 2 jobs failed" in done.stderr


def test_a_job_can_be_started_again_from_its_overrides_alone(run_program: RunProgram, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "my dir, 1" / "model").mkdir(parents=True)
    (tmp_path / "my dir, 1" / "model" / "mine.yaml").write_text(
        "defaults: [_schema, _self_]\nname: x=1\npretrained: y\n"
    )
    argv = ["+model=mine", "data=jsonl", "data.path=a, (b)", "--config-dir", "my dir, 1", "hydra.run.dir=my run"]
    first = run_program("probe", *argv)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == "0.001 a, (b) x=1 True my run"
    again = run_program("probe", *ast.literal_eval(first.stdout.splitlines()[1]), env={"CALM_RUN_DIR": "my run"})
    resumed = run_program("probe", "resume=my run")
    assert again.stdout == first.stdout
    assert resumed.stdout.splitlines()[0] == first.stdout.splitlines()[0]
