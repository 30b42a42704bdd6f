"""Files that survive a crash: written aside, synced, hashed, then renamed. No pickle anywhere.

A folder is complete exactly when its MANIFEST.json (sha256 and size of every file, written last) matches.
``CALM_FAILPOINT=<name>`` or ``<name>:<n>`` kills the process at the n-th passage of a named point, so that
tests can show what a crash leaves behind.
"""

import ctypes
import errno
import fnmatch
import hashlib
import json
import math
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .errors import CheckpointError
from .locking import process_alive

MANIFEST = "MANIFEST.json"
WRITE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS}
_passages: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here, as by a power cut, when the environment asks for it."""
    wanted, _, count = os.environ.get("CALM_FAILPOINT", "").partition(":")
    if wanted == name:
        _passages[name] += 1
        if _passages[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sync(path: Path) -> None:
    """Make a file's content, or the renames inside a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_failure(path: str | Path, error: BaseException, needed: int | None = None) -> CheckpointError:
    """The one-line error of a failed write: path, reason, bytes needed and bytes free."""
    folder = Path(path).parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    size = f"; it needs {needed:,} bytes" if needed is not None else ""
    return CheckpointError(
        f"cannot write {path}: {reason}{size}, {shutil.disk_usage(folder).free:,} bytes are free there. "
        "What was saved before is untouched; free space or choose another folder, then resume"
    )


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Replace the file ``path`` by ``data`` so that a reader sees the old or the new content, never a part.

    Raises CheckpointError naming path and bytes when the write fails; the old file stays.
    """
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(path, error, len(data)) from error


def finite(value: Any) -> Any:
    """Numbers as JSON has them: NaN and infinities become None, so that they never read as finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def write_json(path: str | Path, value: Any) -> None:
    """``write_atomic`` of a JSON document; NaN and infinity are refused, as JSON has none."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Parse a JSON file. Raises CheckpointError naming the file when it is missing or no JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_manifest(folder: str | Path) -> None:
    """(Re)write ``folder``/MANIFEST.json over the files that are there now."""
    folder = Path(folder)
    files = {
        name: {"sha256": sha256_file(folder / name), "size": (folder / name).stat().st_size} for name in _files(folder)
    }
    write_json(folder / MANIFEST, {"version": 1, "files": files})


def _files(folder: Path) -> list[str]:
    """Relative names of all files below ``folder``, its own manifest left out."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def read_manifest(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Name -> {sha256, size} of a folder. Raises CheckpointError when it has no usable manifest."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete: it has no {MANIFEST}, which is written last")
    document = read_json(path)
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is no manifest: it lists no files")
    return files


def verify_manifest(folder: str | Path, ignore: Sequence[str] = (), allow_unlisted: bool = False) -> None:
    """Compare every file of ``folder`` with its manifest.

    Args:
        ignore: glob patterns of relative names that are not looked at, such as ``calibration/*``.
        allow_unlisted: accept files that the manifest does not name.

    Raises CheckpointError naming the file and what is wrong: missing, unlisted, truncated, sha256 mismatch.
    """
    folder = Path(folder)
    listed = read_manifest(folder)

    def ignored(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in ignore)

    for name, entry in listed.items():
        if ignored(name):
            continue
        _verify_file(folder / name, entry)
    unlisted = [name for name in _files(folder) if name not in listed and not ignored(name)]
    if unlisted and not allow_unlisted:
        raise CheckpointError(f"{folder / unlisted[0]} is not listed in {MANIFEST}: remove it, or copy the folder anew")


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {MANIFEST} lists it")
    size = path.stat().st_size
    if size != entry.get("size"):
        raise CheckpointError(f"{path} has {size:,} bytes, {MANIFEST} says {entry.get('size'):,}: truncated or edited")
    if sha256_file(path) != entry.get("sha256"):
        raise CheckpointError(f"{path}: sha256 mismatch with {MANIFEST}: damaged or edited")


def _exchange(new: Path, old: Path) -> None:
    """Put ``new`` in the place of the existing folder ``old``; afterwards ``new`` names the replaced one.

    One atomic system call on Linux. Elsewhere two renames; if the second fails the first is undone.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if renameat2 is not None and renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), exchange) == 0:
        return
    aside = old.with_name(f".{old.name}.old-{os.getpid()}")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def _remove_abandoned(target: Path) -> None:
    """Delete temporary siblings of ``target`` whose writer no longer lives."""
    for path in target.parent.glob(f".{target.name}.tmp-*"):
        pid = path.name.rpartition(".tmp-")[2].partition("-")[0]
        if pid.isdigit() and not process_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_folder(target: str | Path, failpoints: str = "folder", needed: int | None = None) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; when the block ends well it takes target's place, whole or not at all.

    Args:
        failpoints: prefix of the points ``.before_manifest``, ``.before_rename`` and ``.after_rename``.
        needed: bytes that the folder will take, named in the error of a full disk.

    Raises CheckpointError when the disk is full; whatever the error, the temporary folder is removed and an
    existing ``target`` is left as it was.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-{os.getpid()}-", dir=target.parent))
        temporary.chmod(0o755)
    except OSError as error:
        raise write_failure(target, error, needed) from error
    try:
        try:
            yield temporary
        except (OSError, SafetensorError) as error:
            if isinstance(error, SafetensorError) or error.errno in WRITE_ERRORS:
                raise write_failure(target, error, needed) from error
            raise
        except CheckpointError as error:  # a file's own error: the user knows the target, not our temporary name
            raise CheckpointError(str(error).replace(str(temporary), str(target))) from error.__cause__
        try:
            _complete(temporary, target, failpoints)
        except OSError as error:
            raise write_failure(target, error, needed) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _complete(temporary: Path, target: Path, failpoints: str) -> None:
    """Sync, list, sync, rename: in this order a listed file is on the disk, and a renamed folder is listed."""
    for name in _files(temporary):
        sync(temporary / name)
    failpoint(f"{failpoints}.before_manifest")
    write_manifest(temporary)
    for path in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
        sync(path)
    failpoint(f"{failpoints}.before_rename")
    if target.exists():
        _exchange(temporary, target)
    else:
        os.rename(temporary, target)
    sync(target.parent)
    failpoint(f"{failpoints}.after_rename")


def save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically. Tensors may have any shape; shared storage must be resolved before.

    Raises CheckpointError naming path and bytes needed when the write fails; the old file stays.
    """
    path = Path(path)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        save_file(whole, temporary, metadata={"format": "pt", **(metadata or {})})
        temporary.chmod(0o644)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(path, error, needed) from error


def load_tensors(path: str | Path, verify: bool = True) -> dict[str, torch.Tensor]:
    """Read a safetensors file to the CPU.

    Args:
        verify: compare with the manifest of its folder, when that lists the file (the format has no checksum).

    Raises CheckpointError naming the file: missing, empty, truncated, of another format, or sha256 mismatch.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
    if verify and (path.parent / MANIFEST).is_file():
        entry = read_manifest(path.parent).get(path.name)
        if entry is not None:
            _verify_file(path, entry)
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file (truncated or damaged): {error}") from error
