"""Logged requests as a corpus: every text once, without references; other lines are no rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calm.config import DataConfig, SplitConfig
from calm.data import load_corpus
from calm.errors import ConfigError, DataError

SPLIT = SplitConfig(dev=0.2, calibration=0.79, test=0.005)


def log(folder: Path, *lines: object) -> DataConfig:
    path = folder / "server.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return DataConfig(name="requests", path=str(path), split=SPLIT)


def test_every_text_counts_once_and_other_lines_are_skipped(tmp_path: Path) -> None:
    asked = [{"id": f"r{i}", "prompt": f"text {i % 40}", "status": 200} for i in range(120)]
    data = log(tmp_path, {"event": "ready"}, *asked, {"id": "x", "prompt": None}, {"id": "y", "prompt": [5, 6]})
    corpus = load_corpus(data, splits=("dev", "calibration"))
    rows = [row for split in corpus.splits.values() for row in split]
    assert {row.target for row in rows} == {""} and len({row.source for row in rows}) == len(rows)
    assert 30 <= len(rows) <= 40 and corpus.audit["dropped"]["duplicate pair"] == 80
    several = load_corpus(log(tmp_path, {"id": "y", "prompt": [f"text {i}" for i in range(40)]}), splits=("dev",))
    assert several.splits["dev"] == [replace(row, id=each.id) for row, each in zip(
        corpus.splits["dev"], several.splits["dev"], strict=True)]  # fmt: skip
    again = load_corpus(log(tmp_path, *reversed(asked)), splits=("dev", "calibration"))
    assert {row.source for row in again.splits["dev"]} == {row.source for row in corpus.splits["dev"]}


def test_a_log_without_prompts_and_no_log_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no line has a prompt; a server logs prompts when"):
        load_corpus(log(tmp_path, {"event": "ready"}), splits=("dev",))
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(DataConfig(name="requests", path=str(tmp_path / "none")), splits=("dev",))
    with pytest.raises(ConfigError, match="needs data.path"):
        load_corpus(DataConfig(name="requests"), splits=("dev",))
