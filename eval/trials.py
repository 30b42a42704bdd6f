"""Trials of an experiment: each measured once, kept in the run's folder as done, failed or running.

A run that was killed goes on where it was: give the same ``hydra.run.dir=``. What failed, or was running when the
process ended, is tried again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from calm.calibration.identity import hash_json
from calm.checkpoint import finite, read_json, write_json
from calm.errors import CalmError
from calm.progress import Progress

Row = dict[str, Any]


class State(str, Enum):
    """Of a trial in the ledger."""

    done = "done"
    failed = "failed"
    running = "running"


@dataclass(frozen=True)
class Trial:
    """One point of an experiment.

    Attributes:
        values: what it is; columns of all its rows.
        measure: its rows, each without those columns.
        label: its name, where the values make a long one.
    """

    values: Mapping[str, Any]
    measure: Callable[[], Sequence[Mapping[str, Any]]] = field(compare=False, repr=False)
    label: str = ""

    @property
    def name(self) -> str:
        """For people, and as a file."""
        said = self.label or "-".join(map(str, self.values.values()))
        return "".join(letter if letter.isalnum() or letter in "-._=" else "_" for letter in said)


@dataclass
class Found:
    """What the trials of a run brought: rows of those that are done, and why others failed."""

    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Ledger:
    """Records of trials under one folder; ``asked`` is what they have in common, and another ledger where that changes.

    Args:
        asked: JSON-ready.
    """

    def __init__(self, run_dir: Path, asked: Mapping[str, Any]) -> None:
        self.folder = run_dir / "trials" / hash_json(dict(asked))[:12]

    def run(self, trials: Sequence[Trial], title: str, say: Callable[[str], None]) -> Found:
        """Every trial that is not done yet, in order; one that raises CalmError fails alone.

        Raises:
            ValueError: two trials have one name.
        """
        if len({trial.name for trial in trials}) < len(trials):
            raise ValueError(f"{title}: two trials have one name")
        found, todo = Found(), [trial for trial in trials if self.kept(trial) is None]
        self.folder.mkdir(parents=True, exist_ok=True)
        with Progress(len(todo), title, unit="trial") as bar:
            for trial in todo:
                self._measure(trial, say)
                bar.update()
        for trial in trials:
            record = read_json(self._path(trial))
            if record["state"] == State.done.value:
                found.rows += [{**trial.values, **row} for row in record["rows"]]
            else:
                found.failed[trial.name] = str(record["why"])
        return found

    def kept(self, trial: Trial) -> list[Row] | None:
        """Rows of a trial that is done; None of any other."""
        path = self._path(trial)
        if not path.is_file():
            return None
        record = json.loads(path.read_text("utf-8"))
        return record["rows"] if record["state"] == State.done.value else None

    def _measure(self, trial: Trial, say: Callable[[str], None]) -> None:
        path, began = self._path(trial), time.monotonic()
        record: Row = {"state": State.running.value, "trial": dict(trial.values)}
        write_json(path, record)
        try:
            rows = finite([dict(row) for row in trial.measure()])
        except CalmError as error:
            say(f"{trial.name}: failed: {error}")
            write_json(path, {**record, "state": State.failed.value, "why": str(error)})
            return
        seconds = round(time.monotonic() - began, 3)
        write_json(path, {**record, "state": State.done.value, "seconds": seconds, "rows": rows})

    def _path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.name}.json"
