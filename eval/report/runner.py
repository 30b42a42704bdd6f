"""Experiments one after the other, each in a process of its own; what became of each is kept in a ledger.

Timings need the machine alone, so nothing runs beside. What is done is not run again; what failed, or was running when
the report ended, is, and its own ledger lets it go on where it was.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from calm.checkpoint import read_json, write_json
from calm.child import die_with_parent
from calm.errors import CalmError

from ..experiment import UNFINISHED
from ..trials import State

STOP_S = 20.0  # between the two signals that end a process
LAST = 400  # letters of a log's last line
_OURS = ("CALM_RUN_DIR",)  # in the environment: of this report and not of its experiments


@dataclass(frozen=True)
class Step:
    """One program to run.

    Attributes:
        argv: its settings, without the run folder.
        folder: that it writes into.
        about: what its numbers depend on beside the settings, such as the hash of the weights.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    folder: Path
    about: str = ""

    @property
    def command(self) -> str:
        """For people."""
        return said_command(self.module, [*self.argv, f"hydra.run.dir={self.folder}"])


@dataclass(frozen=True)
class Ended:
    """What became of a step; ``state`` is missing where it was never run."""

    state: str
    seconds: float = 0.0
    why: str = ""
    argv: tuple[str, ...] | None = None
    about: str = ""


MISSING = "missing"


def said_command(module: str, argv: Sequence[str]) -> str:
    return shlex.join(["python", "-m", module, *argv])


class Runs:
    """The ledger under a report's folder."""

    def __init__(self, report_dir: Path) -> None:
        self.folder = report_dir / "ledger"

    def ended(self, name: str, folder: Path) -> Ended:
        """What the ledger says; a folder with a summary that no step has left is done all the same."""
        path = self._path(name)
        if path.is_file():
            values = read_json(path)
            return Ended(**{**values, "argv": tuple(values["argv"])})
        return Ended(State.done.value) if (folder / "summary.json").is_file() else Ended(MISSING)

    def is_done(self, step: Step) -> bool:
        """With these settings and this model, and its summary is there."""
        found = self.ended(step.name, step.folder)
        same = found.argv is None or (found.argv, found.about) == (step.argv, step.about)
        return found.state == State.done.value and same and (step.folder / "summary.json").is_file()

    def run(self, step: Step, minutes: float | None) -> Ended:
        """Run it to its end, unless it is done; its output goes to ``log.txt`` of its folder.

        Args:
            minutes: after which it is stopped.
        """
        if self.is_done(step):
            return self.ended(step.name, step.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        step.folder.mkdir(parents=True, exist_ok=True)
        (step.folder / "summary.json").unlink(missing_ok=True)  # of other settings, or of trials that failed
        self._keep(step, Ended(State.running.value, argv=step.argv, about=step.about))
        began = time.monotonic()
        why = self._until_end(step, minutes)
        state = State.failed if why else State.done
        found = Ended(state.value, round(time.monotonic() - began, 3), why, step.argv, step.about)
        self._keep(step, found)
        return found

    def _until_end(self, step: Step, minutes: float | None) -> str:
        """Why it failed; empty where it did not."""
        log = step.folder / "log.txt"
        try:
            status = run_logged([*_python(step.module), *step.argv, f"hydra.run.dir={step.folder}"], log, minutes)
        except subprocess.TimeoutExpired:
            return f"stopped after {minutes:g} minutes; call again to go on"
        if status == 0:
            return "" if (step.folder / "summary.json").is_file() else "it ended without a summary.json"
        if status == UNFINISHED and (step.folder / "summary.json").is_file():
            return some_failed(read_json(step.folder / "summary.json"))
        return last_line(log) if status > 0 else f"ended by {signal.Signals(-status).name}: {last_line(log)}"

    def _keep(self, step: Step, found: Ended) -> None:
        write_json(self._path(step.name), asdict(found))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def run_logged(command: Sequence[str], log: Path, minutes: float | None = None) -> int:
    """Exit status of a program whose output goes to a file; negative: the signal that ended it.

    It has a session of its own, so that Ctrl-C is the caller's to handle and its own children end with it; it ends when
    this process ends, however that ends.

    Raises:
        TimeoutExpired: it ran longer and was ended.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    parent = os.getpid()

    def with_parent() -> None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("ab") as lines:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=with_parent,
        )  # fmt: skip
        try:
            return process.wait(None if minutes is None else 60 * minutes)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it and its children, then force them."""
    if process.poll() is None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
                break


def some_failed(summary: Mapping[str, object]) -> str:
    """Why a program that wrote its summary is not finished."""
    failed = summary.get("failed")
    if not isinstance(failed, dict) or not failed:
        return "it is not finished"
    name, why = next(iter(failed.items()))
    return f"{len(failed)} of its trials failed, {name}: {why}"


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:LAST] if lines else "it said nothing"


def model_hash(folder: Path | None) -> str:
    """Of the manifest of a model folder; empty where there is none."""
    from calm.checkpoint import sha256_file

    manifest = None if folder is None else folder / "MANIFEST.json"
    return sha256_file(manifest) if manifest is not None and manifest.is_file() else ""


def table1_folder(folder: Path) -> bool:
    """Whether a run of eval.table1 has left its records there."""
    try:
        return "table1" in read_json(folder / "summary.json") and (folder / "records.parquet").is_file()
    except (OSError, ValueError, CalmError):
        return False
