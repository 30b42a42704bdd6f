"""A server of ours in a process of its own, for programs that measure it: ``python -m serve`` at a free port.

with own_server(folder, run_dir / "server.log", ["max_batch=8"]) as server:
    client = Client(server.url)
"""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from calm.errors import CalmError

MIB = 2**20
START_S = 120.0  # until it is ready
STOP_S = 60.0  # until it has drained
POLL_S = 0.05


@dataclass(frozen=True)
class Held:
    """What the server's processes hold together.

    Attributes:
        rss_mib: resident memory; pages that processes share count in each.
    """

    rss_mib: float
    files: int
    threads: int
    processes: int


class OwnServer:
    """A running server.

    Attributes:
        ready_s: from its start to its first "ready"; 0 before ``wait_until_ready``.
    """

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path, began: float) -> None:
        self.process, self.url, self.log, self._began = process, url, log, began
        self.ready_s = 0.0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        """Status and body. Raises OSError where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 where it has none yet."""
        _, body = self.get("/metrics")
        lines = [line for line in body.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def processes(self) -> list[psutil.Process]:
        """The server's, and those that it has started."""
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def held(self) -> Held:
        """Now; of processes that end meanwhile, nothing."""
        memory, files, threads, count = 0, 0, 0, 0
        for each in self.processes():
            try:
                with each.oneshot():
                    found = each.memory_info().rss, each.num_fds(), each.num_threads()
            except psutil.NoSuchProcess:
                continue
            memory, files, threads, count = memory + found[0], files + found[1], threads + found[2], count + 1
        return Held(memory / MIB, files, threads, count)

    def wait(self, what: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to that in time; also false where the server has ended."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError):  # it takes no connections yet, or no more
                if what():
                    return True
            time.sleep(POLL_S)
        return False

    def wait_until_ready(self, seconds: float = START_S) -> float:
        """``ready_s``. Raises CalmError where it is not in time, with the end of the log."""
        if not self.wait(lambda: self.get("/readyz")[0] == 200, seconds):
            raise not_ready(self.log)
        self.ready_s = time.monotonic() - self._began
        return self.ready_s

    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return self.metric("calm_num_requests_running") + self.metric("calm_num_requests_waiting") == 0.0

    def stop(self) -> int:
        """Drain; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def not_ready(log: Path) -> CalmError:
    last = log.read_text().splitlines()[-1:] or ["it said nothing"]
    return CalmError(f"the server did not become ready: {last[0][:300]} (all of it in {log})")


@contextmanager
def own_server(folder: Path, log: Path, settings: Sequence[str] = ()) -> Iterator[OwnServer]:
    """Serve a model folder until the block ends, and drain then; what the server logs is appended to ``log``.

    Raises:
        CalmError: it was not ready in time.
    """
    with listening(folder, log, settings) as server:
        server.wait_until_ready()
        yield server
        server.stop()


@contextmanager
def listening(folder: Path, log: Path, settings: Sequence[str] = ()) -> Iterator[OwnServer]:
    """The same from where it listens, ready or not; killed with the end of the block.

    Raises:
        CalmError: it has ended before.
    """
    run_dir = log.parent / "server"
    command = [
        sys.executable, "-m", "serve", f"checkpoint={folder.resolve()}", "port=0", f"hydra.run.dir={run_dir.resolve()}",
        *settings,
    ]  # fmt: skip
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name not in ("CALM_RUN_DIR", "CALM_API_KEY")}
    with log.open("a") as lines:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines, text=True, env=environment)
    assert process.stdout is not None
    try:
        told = process.stdout.readline()  # empty where it has ended
        if not told:
            raise not_ready(log)
        yield OwnServer(process, told.strip().rpartition(" ")[2], log, began)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
