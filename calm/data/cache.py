"""Build once, read whole: corpora that take long to make are kept in a folder that is complete or absent.

The lock is the kernel's (flock), so it ends with its owner however that dies; what a killed builder left is
removed by the next one. A reader compares every file with the manifest and rebuilds what does not match.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import atomic_folder, failpoint, verify_manifest
from ..errors import CheckpointError, DataError
from ..records import Example

logger = logging.getLogger(__name__)

_ROWS, _INFO = "rows.jsonl", "info.json"


def cache_root(cache_dir: str | None) -> Path:
    """``data.cache_dir``, else $CALM_CACHE, else ~/.cache/calm."""
    return Path(cache_dir or os.environ.get("CALM_CACHE") or Path.home() / ".cache" / "calm").expanduser()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` exclusively among processes; say so when another one has it."""
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            logger.info("process %s is building %s; waiting for it", file.read().strip() or "?", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _complete(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        verify_manifest(folder)
    except CheckpointError as error:
        logger.warning("%s; building this corpus anew", error)
        return False
    return True


def build_once(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Folder ``root/key`` filled by ``build(folder)``, by exactly one process; verified by hash before it is returned.

    Raises:
        DataError: the cache folder cannot be written.
    """
    folder = root / key
    if _complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            if not _complete(folder):
                with atomic_folder(folder, failpoints="cache") as temporary:
                    build(temporary)
    except (OSError, CheckpointError) as error:
        raise DataError(
            f"cannot build the corpus in the cache {root}: {error}; "
            "set data.cache_dir or CALM_CACHE to a folder that can be written"
        ) from error
    return folder


def cached_rows(
    root: Path, key: str, build: Callable[[dict[str, str]], Iterable[Example]]
) -> tuple[list[Example], dict[str, str]]:
    """Rows made by ``build(info)`` once, and the ``info`` (where from, when) that it filled in."""

    def write(folder: Path) -> None:
        info: dict[str, str] = {}
        with open(folder / _ROWS, "w", encoding="utf-8") as file:
            for row in build(info):
                file.write(json.dumps([row.id, row.family, row.source, row.target], ensure_ascii=False) + "\n")
                failpoint("cache.row")
        (folder / _INFO).write_text(json.dumps(info), encoding="utf-8")

    folder = build_once(root, key, write)
    with open(folder / _ROWS, encoding="utf-8") as file:
        rows = [Example(*json.loads(line)) for line in file]
    return rows, json.loads((folder / _INFO).read_text(encoding="utf-8"))
