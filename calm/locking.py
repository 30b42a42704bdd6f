"""One writer at a time for a folder."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from .errors import TrainingError


def process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunLock:
    """At most one process writes into a run folder.

    The kernel drops the lock when its holder dies, so a lock file left by a dead process is simply taken over.
    Where the file system has no locks, a living pid in the file counts as held.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / ".lock"
        self._descriptor: int | None = None

    def acquire(self) -> "RunLock":
        """Raises TrainingError naming the holder's pid when another process has the folder."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        except OSError:
            held = self._named_holder_lives(descriptor)
        if held:
            holder = self._holder(descriptor)
            os.close(descriptor)
            raise TrainingError(
                f"{self.path.parent} is in use by process {holder.get('pid', 'unknown')} on {holder.get('host', '?')}; "
                "wait for it, stop it, or choose another run folder"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._descriptor = descriptor
        return self

    @staticmethod
    def _holder(descriptor: int) -> dict[str, Any]:
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _named_holder_lives(self, descriptor: int) -> bool:
        holder = self._holder(descriptor)
        here = holder.get("host") == socket.gethostname()
        return bool(holder) and (not here or process_alive(int(holder.get("pid", 0))))

    def release(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunLock":
        return self.acquire() if self._descriptor is None else self

    def __exit__(self, *_: object) -> None:
        self.release()
