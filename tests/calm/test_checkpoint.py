"""What a crash, a full disk or a damaged file leaves behind, and what is said about it."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calm.checkpoint import (
    MANIFEST,
    atomic_folder,
    load_tensors,
    save_tensors,
    sha256_file,
    verify_manifest,
    write_atomic,
)
from calm.errors import CheckpointError, TrainingError
from calm.locking import RunLock

# The children only write files and die; Python 3.12 warns because torch has started threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def make_folder(target: Path, value: float = 1.0, failpoints: str = "folder") -> None:
    with atomic_folder(target, failpoints) as folder:
        save_tensors(folder / "model.safetensors", {"w": torch.full((50, 3), value)})
        (folder / "sub").mkdir()
        (folder / "sub" / "state.json").write_text(json.dumps({"value": value}))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".tmp-" in path.name or ".old-" in path.name)


def test_a_folder_is_complete_listed_and_replaceable(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", 1.0)
    verify_manifest(tmp_path / "a")
    listed = json.loads((tmp_path / "a" / MANIFEST).read_text())["files"]
    assert set(listed) == {"model.safetensors", "sub/state.json"}
    assert listed["sub/state.json"]["sha256"] == sha256_file(tmp_path / "a/sub/state.json")
    make_folder(tmp_path / "a", 2.0)
    verify_manifest(tmp_path / "a")
    assert load_tensors(tmp_path / "a/model.safetensors")["w"][0, 0] == 2.0
    assert leftovers(tmp_path) == []


def test_replacing_works_without_the_exchange_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "a", 1.0)
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    make_folder(tmp_path / "a", 2.0)
    verify_manifest(tmp_path / "a")
    assert load_tensors(tmp_path / "a/model.safetensors")["w"][0, 0] == 2.0
    assert leftovers(tmp_path) == []


def test_an_error_inside_keeps_the_old_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", 1.0)
    with pytest.raises(KeyError, match="mine"), atomic_folder(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        raise KeyError("mine")
    verify_manifest(tmp_path / "a")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("point", ["before_manifest", "before_rename", "after_rename"])
def test_killed_at_a_failpoint_leaves_an_old_or_a_new_folder(tmp_path: Path, point: str) -> None:
    make_folder(tmp_path / "a", 1.0)
    pid = os.fork()
    if pid == 0:
        os.environ["CALM_FAILPOINT"] = f"ckpt.{point}"
        make_folder(tmp_path / "a", 2.0, "ckpt")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    verify_manifest(tmp_path / "a")
    assert load_tensors(tmp_path / "a/model.safetensors")["w"][0, 0] == (2.0 if point == "after_rename" else 1.0)
    make_folder(tmp_path / "a", 3.0)  # the next writer removes what the dead one left
    assert leftovers(tmp_path) == []


def test_a_failpoint_counts_its_passages(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.environ["CALM_FAILPOINT"] = "count.before_rename:2"
        make_folder(tmp_path / "a", 1.0, "count")
        make_folder(tmp_path / "b", 1.0, "count")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        data = data[: len(data) // 2]
    elif kind == "empty":
        data = bytearray()
    elif kind == "bit-flipped":
        data[-1] ^= 1
    elif kind == "oversized header":
        data[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", "truncated"),
        ("empty", "empty"),
        ("bit-flipped", "sha256 mismatch"),
        ("oversized header", "sha256 mismatch"),
    ],
)
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, kind: str, said: str) -> None:
    make_folder(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    damage(file, kind)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_tensors(file)
    assert str(file) in str(caught.value)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        verify_manifest(tmp_path / "a")


@pytest.mark.parametrize("kind", ["truncated", "oversized header"])
def test_damaged_tensors_without_a_manifest_are_refused_too(tmp_path: Path, kind: str) -> None:
    save_tensors(tmp_path / "x.safetensors", {"w": torch.ones(9)})
    damage(tmp_path / "x.safetensors", kind)
    with pytest.raises(CheckpointError, match="x.safetensors is no readable safetensors file"):
        load_tensors(tmp_path / "x.safetensors")


def test_missing_unlisted_and_absent_manifest_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    (tmp_path / "a" / "extra.txt").write_text("?")
    with pytest.raises(CheckpointError, match="extra.txt is not listed"):
        verify_manifest(tmp_path / "a")
    verify_manifest(tmp_path / "a", ignore=["extra*"])
    verify_manifest(tmp_path / "a", allow_unlisted=True)
    (tmp_path / "a" / "extra.txt").rename(tmp_path / "extra.txt")
    (tmp_path / "a/sub/state.json").unlink()
    with pytest.raises(CheckpointError, match="state.json is missing"):
        verify_manifest(tmp_path / "a")
    (tmp_path / "a" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        verify_manifest(tmp_path / "a")
    with pytest.raises(CheckpointError, match="gone.safetensors is missing"):
        load_tensors(tmp_path / "gone.safetensors")


def test_a_manifest_that_is_no_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[1")
    with pytest.raises(CheckpointError, match="cannot read"):
        verify_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("[1]")
    with pytest.raises(CheckpointError, match="no manifest"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("writer", ["tensors", "bytes", "foreign"])
def test_a_write_over_the_limit_names_path_and_bytes_and_keeps_the_old(tmp_path: Path, writer: str) -> None:
    make_folder(tmp_path / "a", 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError) as caught, atomic_folder(tmp_path / "a", needed=400_000) as folder:
            if writer == "tensors":
                save_tensors(folder / "model.safetensors", {"w": torch.ones(100_000)})
            elif writer == "bytes":
                write_atomic(folder / "model.safetensors", bytes(400_000))
            else:
                (folder / "model.safetensors").write_bytes(bytes(400_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "400,000 bytes" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "File too large" in str(caught.value)
    verify_manifest(tmp_path / "a")
    assert leftovers(tmp_path) == []


def test_an_unwritable_target_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am no folder")
    with pytest.raises(CheckpointError, match="cannot write"), atomic_folder(tmp_path / "file" / "a"):
        pass


def test_the_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        code = (
            "import sys; from calm.locking import RunLock; from calm.errors import TrainingError\n"
            "try: RunLock(sys.argv[1]).acquire()\n"
            "except TrainingError as error: print(error)"
        )
        out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert f"in use by process {os.getpid()}" in out.stdout
    with RunLock(tmp_path):
        with pytest.raises(TrainingError, match=f"process {os.getpid()}"):
            RunLock(tmp_path).acquire()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        RunLock(tmp_path).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == pid
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_without_file_locks_a_living_pid_holds_and_a_dead_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with RunLock(tmp_path), pytest.raises(TrainingError, match=f"process {os.getpid()}"):
        RunLock(tmp_path).acquire()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    lock = json.loads('{"pid": 0, "host": ""}') | {"pid": pid, "host": os.uname().nodename}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    RunLock(tmp_path).acquire().release()
