"""A peer's process as its parent sees it: started, asked, timed out, ended (words: eval/peer_workers/protocol.py).

Only one of several workers is ever asked at a time; the others sleep on their pipes.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from calm.environment import ONE_OF_SEVERAL
from calm.errors import CalmError

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONWARNINGS")  # would lead one environment into another
LINE = 1 << 16


class PeerError(CalmError):
    """A peer cannot be had, failed, died or did not answer in time; it is named, with the reason.

    ``peer`` is its name.
    """

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer, self.reason = peer, reason


def worker_environment(threads: int) -> dict[str, str]:
    """Variables of a worker: ``threads`` threads, none of which spins, no hub, no pool of compilers."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    count = str(threads)
    return {
        **kept,
        **ONE_OF_SEVERAL,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class WorkerProcess:
    """One worker.

    Args:
        name: of the peer.
        command: starts the worker.
        log: file that its stderr goes to.
        threads: that it may use.

    Raises:
        PeerError: it cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, threads: int = 1) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._unread = b""
        with log.open("ab") as said:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                    env=worker_environment(threads), process_group=0,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(name, f"cannot be started: {error}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, timeout: float, **values: Any) -> dict[str, Any]:
        """The reply to one request.

        Args:
            timeout: seconds.

        Raises:
            PeerError: it says that it failed; or it died, hung, or spoke no sense: then it is ended.
        """
        if self._process.stdin is None or self._process.stdin.closed:
            raise PeerError(self.name, f"was ended before {op!r}")
        try:
            line = self._exchange(json.dumps({"op": op, **values}).encode() + b"\n", time.monotonic() + timeout)
        except TimeoutError:
            self.end()
            raise PeerError(self.name, f"no answer to {op!r} within {timeout:g} s{self._told()}") from None
        except (BrokenPipeError, EOFError):
            status = self._status()
            raise PeerError(self.name, f"{status} at {op!r}{self._told()}") from None
        try:
            reply: dict[str, Any] = json.loads(line)
            ok = reply["ok"]
        except (ValueError, KeyError, TypeError):
            self.end()
            raise PeerError(self.name, f"answered {op!r} with {line[:80]!r}, which is no reply") from None
        if not ok:
            raise PeerError(self.name, str(reply.get("error", "failed without a reason")))
        return reply

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        """Write a line and read one; both in pieces, so that nobody waits for ever."""
        while request or b"\n" not in self._unread:
            left = deadline - time.monotonic()
            readable, writable, _ = select.select([self._out], [self._into] if request else [], [], max(0.0, left))
            if writable:
                request = request[os.write(self._into, request[:LINE]) :]
            if readable:
                piece = os.read(self._out, LINE)
                if not piece:
                    raise EOFError
                self._unread += piece
            if not readable and not writable and time.monotonic() >= deadline:
                raise TimeoutError
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _status(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.end()
            return "closed its pipe and went on"
        if code >= 0:
            return f"ended with exit status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def _told(self) -> str:
        """The last line of its log, behind a semicolon; empty where it said nothing."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f"; its log ends with: {said[-1][:200]}" if said else ""

    def end(self) -> None:
        """End it and what it started, at once."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # its own group: nobody else is in it
            except ProcessLookupError:
                pass
        self._process.wait()
        self._close_pipes()

    def close(self, timeout: float = 10.0) -> None:
        """Let it go; end it if it does not."""
        if self._process.poll() is None:
            try:
                os.set_blocking(self._into, True)
                os.write(self._into, b'{"op": "quit"}\n')
                self._process.wait(timeout)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.end()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # such as Ctrl-C: nobody waits for a worker that is at work
            self.end()


def load(worker: WorkerProcess, timeout: float, **values: Any) -> Mapping[str, Any]:
    """Have it open its model; what it tells about itself."""
    about: Mapping[str, Any] = worker.ask("load", timeout, **values)["about"]
    return about
