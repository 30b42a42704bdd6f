"""Plain lines where there is no terminal, a bar where there is one, and the machine's stamp."""

import io
import subprocess
from pathlib import Path

import pytest

from calm.environment import cpu_name, environment, git_state, usable_cores
from calm.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "0:00"), (75.0, "1:15"), (3599.6, "1:00:00"), (3725.0, "1:02:05")])
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_plain_lines_tell_counts_time_left_and_stats() -> None:
    out = io.StringIO()
    with Progress(4, "finetune", "step", stream=out, every_s=0.0) as bar:
        bar.update(1, loss=2.5)
        bar.say("between")
        bar.update(3, state="late")
    first, between, last = out.getvalue().splitlines()
    assert first.startswith("finetune: 1/4 steps, 0:00 gone, 0:00 left, loss 2.5")
    assert between == "between" and last == "finetune: 4/4 steps, 0:00 gone, loss 2.5, state late"


def test_plain_lines_are_few_and_can_be_off() -> None:
    out = io.StringIO()
    bar = Progress(100, "x", stream=out)
    for _ in range(100):
        bar.update()
    assert len(out.getvalue().splitlines()) == 2  # the first and the last
    quiet = io.StringIO()
    with Progress(2, "x", stream=quiet, shown=False) as bar:
        bar.update(2)
        bar.say("nothing")
    assert quiet.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    with Progress(2, "decode", stream=out, done=1) as bar:
        bar.say("told")
        bar.update(1, loss=1.0)
    assert "decode" in out.getvalue() and "100%" in out.getvalue() and "told" in out.getvalue()


def test_the_stamp_names_versions_and_machine(tmp_path: Path) -> None:
    stamp = environment()
    assert stamp["packages"]["torch"].startswith("2.") and stamp["cores"] == usable_cores() >= 1
    assert stamp["cpu"] == cpu_name() != ""
    assert git_state(tmp_path) == {"commit": None, "dirty": None}


def test_the_stamp_tells_commit_and_changes(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {**clean, "dirty": True}
    (tmp_path / ".git" / "HEAD").write_text("broken")
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
