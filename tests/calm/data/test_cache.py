import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from calm.data.cache import build_once, cache_root, cached_rows
from calm.data.splits import content_hash
from calm.errors import DataError
from calm.records import Example

FORK = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns when torch has threads
ROOT = Path(__file__).parents[3]
BUILDER = """
import sys
from pathlib import Path
from calm.data.cache import cached_rows
from calm.data.splits import content_hash
from calm.records import Example

def build(info):
    with open(Path(sys.argv[1]) / "built", "a") as file:
        file.write("x")
    info["release"] = "of a test"
    for i in range(2000):
        yield Example(f"id{i}", "f", f"text {i}", "t")

rows, info = cached_rows(Path(sys.argv[1]), "corpus", build)
print(len(rows), content_hash(rows), info["release"])
"""


def slow_build(root: Path) -> Callable[[dict[str, str]], Iterable[Example]]:
    def build(info: dict[str, str]) -> Iterable[Example]:
        with open(root / "built", "a") as file:
            file.write("x")
        for i in range(2000):
            yield Example(f"id{i}", "f", f"text {i}", "t")

    return build


def start(root: Path, answer: Path | None = None, failpoint: str = "") -> ForkProcess:
    """Another process that asks for the corpus and writes down what it got."""

    def ask() -> None:
        os.environ["CALM_FAILPOINT"] = failpoint
        rows, _ = cached_rows(root, "corpus", slow_build(root))
        if answer is not None:
            answer.write_text(f"{len(rows)} {content_hash(rows)}")

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    return process


@FORK
def test_processes_at_once_build_once_and_agree(tmp_path: Path) -> None:
    answers = [tmp_path / f"answer{i}" for i in range(4)]
    processes = [start(tmp_path, answer) for answer in answers]
    for process in processes:
        process.join(120)
    told = {answer.read_text() for answer in answers}
    assert len(told) == 1 and told.pop().startswith("2000 ")
    assert (tmp_path / "built").read_text() == "x"


@pytest.mark.slow
def test_unrelated_commands_at_once_build_once_and_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=240)[0] for process in processes]
    assert told[0] == told[1] and told[0].startswith("2000 ") and "of a test" in told[0]
    assert (tmp_path / "built").read_text() == "x"


@FORK
@pytest.mark.parametrize("point", ["cache.row:1500", "cache.before_manifest", "cache.before_rename"])
def test_a_killed_builder_leaves_nothing_that_is_read(tmp_path: Path, point: str) -> None:
    killed = start(tmp_path, failpoint=point)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "corpus").exists() and len(list(tmp_path.glob(".corpus.tmp-*"))) == 1
    rows, _ = cached_rows(tmp_path, "corpus", two)
    assert [row.id for row in rows] == ["1", "2"]
    assert not list(tmp_path.glob(".corpus.tmp-*"))


def two(info: dict[str, str]) -> Iterable[Example]:
    info["release"] = "two"
    return [Example("1", "f", "line\u2028separator", "t"), Example("2", "f", "b", "u")]


def never(info: dict[str, str]) -> Iterable[Example]:
    raise AssertionError("the cache should have been used")


def test_the_cache_is_used_and_says_where_its_rows_are_from(tmp_path: Path) -> None:
    built = cached_rows(tmp_path, "corpus", two)
    assert cached_rows(tmp_path, "corpus", never) == built
    assert built[0][0].source == "line\u2028separator" and built[1] == {"release": "two"}


def test_a_damaged_cache_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = cached_rows(tmp_path, "corpus", two)
    file = tmp_path / "corpus" / "rows.jsonl"
    file.write_text(file.read_text().replace("separator", "saparetor"))
    assert cached_rows(tmp_path, "corpus", two) == built
    assert "sha256 mismatch" in caplog.text
    file.unlink()
    assert cached_rows(tmp_path, "corpus", two) == built


def test_a_builder_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def broken(info: dict[str, str]) -> Iterable[Example]:
        yield Example("1", "f", "a", "b")
        raise DataError("the mirror went away")

    with pytest.raises(DataError, match="^the mirror went away$"):
        cached_rows(tmp_path, "corpus", broken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.lock"]
    assert len(cached_rows(tmp_path, "corpus", two)[0]) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"cache .*file.*set data\.cache_dir or CALM_CACHE"):
        build_once(blocked / "inner", "corpus", lambda folder: None)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("CALM_CACHE", raising=False)
    assert cache_root(None) == Path("/home/me/.cache/calm")
    monkeypatch.setenv("CALM_CACHE", "~/c")
    assert cache_root(None) == Path("/home/me/c") and cache_root("/x") == Path("/x")
