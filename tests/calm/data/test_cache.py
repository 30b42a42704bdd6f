import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from calm.data.cache import build_once, cache_root, cached_rows
from calm.errors import DataError
from calm.records import Example

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


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_build_once_and_agree(tmp_path: Path) -> None:
    processes = [start(tmp_path), start(tmp_path)]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert told[0] == told[1] and told[0].startswith("2000 ") and "of a test" in told[0]
    assert (tmp_path / "built").read_text() == "x"


@pytest.mark.parametrize("point", ["cache.row:1500", "cache.before_manifest", "cache.before_rename"])
def test_a_killed_builder_leaves_nothing_that_is_read(tmp_path: Path, point: str) -> None:
    killed = start(tmp_path, CALM_FAILPOINT=point)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
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
