"""The stamp beside a number: where it comes from, without the place of a checkout in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from calm.environment import ROOT, environment, git_state, usable_cores


def test_the_stamp_is_plain_json_and_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train" / "__main__.py"), "seed=1"])
    stamp = environment()
    assert stamp["argv"] == ["train/__main__.py", "seed=1"]
    assert str(ROOT) not in json.dumps(stamp)
    assert stamp["packages"]["torch"] and 1 <= stamp["cores"] <= (os.cpu_count() or 1)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/calm-train"])
    assert environment()["argv"] == ["calm-train"]


def test_git_tells_the_commit_and_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALM_COMMIT", raising=False)
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    monkeypatch.setenv("CALM_COMMIT", "told")
    assert git_state(tmp_path) == {"commit": "told", "dirty": None}
    for name in ("results/gpu/summary.json", "results/tiny/model/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("one")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        (tmp_path / "file").write_text("one")
        who = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "results/gpu/summary.json").write_text("two")  # what one command measured dirties not the next one
    assert git_state(tmp_path) == clean
    for name in ("results/tiny/model/config.json", "file"):
        (tmp_path / name).write_text("two")
        assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}
        (tmp_path / name).write_text("one")


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 3), ("200000 100000", 2), ("50000 100000", 1)])
def test_cores_follow_the_affinity_and_the_quota(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    monkeypatch.setattr(Path, "read_text", lambda _: quota)
    assert usable_cores() == cores
