"""A run from complete settings: the same training, without what configures programs."""

import json
from pathlib import Path

import pytest

from calm.config import TrainConfig
from calm.data import load_corpus, tokenised
from calm.errors import ConfigError
from calm.models.folder import load
from calm.tracking import read_metrics
from tests.bare import bare_path
from tests.conftest import RunProgram
from train.run import train
from train.settings import plain
from train.settled import read

from .tiny import tiny_config


def settings_of(config: TrainConfig, folder: Path) -> str:
    path = folder / "settings.json"
    path.write_text(json.dumps(plain(config)))
    return str(path)


def losses(run_dir: Path) -> list[float]:
    return [each["train/loss"] for each in read_metrics(run_dir) if "train/loss" in each]


def test_it_trains_as_a_run_does_with_ids_made_before_and_on_a_bare_machine(
    tmp_path: Path, run_program: RunProgram
) -> None:
    begun, tokens = tmp_path / "begun", tmp_path / "tokens.safetensors"
    train(tiny_config(finetune__steps=1, output=str(begun)), tmp_path / "first")
    config = tiny_config(model=None, checkpoint=str(begun), processes=1)
    train(config, tmp_path / "plain")
    rows = load_corpus(config.data).splits["train"]
    tokenised.write(tokens, load(begun).tokenizer, tokenised.texts_of(rows, config.data.source_prefix))
    config.tokenised = str(tokens)
    done = run_program(
        "train.settled", settings_of(config, tmp_path), str(tmp_path / "settled"),
        env={"PYTHONPATH": bare_path(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "texts are taken from" in done.stderr
    assert losses(tmp_path / "settled") == losses(tmp_path / "plain")


def test_a_file_of_other_texts_is_refused(tmp_path: Path) -> None:
    begun, tokens = tmp_path / "begun", tmp_path / "tokens.safetensors"
    train(tiny_config(finetune__steps=1, output=str(begun)), tmp_path / "first")
    tokenised.write(tokens, load(begun).tokenizer, ["another text"])
    config = tiny_config(model=None, checkpoint=str(begun), tokenised=str(tokens))
    with pytest.raises(ConfigError, match=r"has none of the first \d+ sources of .*texts_of"):
        train(config, tmp_path / "second")


def test_a_mistake_is_one_line(tmp_path: Path, run_program: RunProgram) -> None:
    bare, wrong = {"PYTHONPATH": bare_path(tmp_path)}, tmp_path / "wrong.json"
    assert "takes a file of settings and a run folder" in run_program("train.settled", env=bare).stderr
    for text, said in {"[]": "holds no settings", "{": "is no JSON", '{"seed": "x"}': "seed='x' is no int"}.items():
        wrong.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read(wrong)
    wrong.write_text('{"stage": "rest"}')
    done = run_program("train.settled", str(wrong), str(tmp_path / "run"), env=bare)
    assert done.returncode == 1 and done.stderr.startswith("error: stage='rest' is none")
