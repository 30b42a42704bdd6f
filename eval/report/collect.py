"""What the experiments of a report left: summaries, what they say, their figures, and what is wrong with them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm.checkpoint import read_json
from calm.errors import CalmError

from ..trials import State
from .evidence import STALE
from .experiments import Experiment
from .readings import hook, is_noisy
from .runner import MISSING, Ended, Runs

FILES = ("summary.json", "rows.parquet", "log.txt")


@dataclass(frozen=True)
class Found:
    """An experiment as the page shows it.

    Attributes:
        state: of its run: done, failed, running (its run was cut off) or missing.
        why: it is not done.
        command: that makes it.
        summary: None where it left none.
        said: what it found, a sentence each.
        panels: of its figure, as calm.report_plots gives them.
        flags: what a reader should know before relying on it.
    """

    experiment: Experiment
    state: str
    why: str
    command: str
    folder: Path
    seconds: float = 0.0
    summary: Mapping[str, Any] | None = None
    said: Sequence[str] = ()
    panels: Sequence[Any] = ()
    flags: Sequence[str] = field(default=())

    @property
    def files(self) -> list[Path]:
        """Those that are there: data, log, figures."""
        figures = [str(name) for name in (self.summary or {}).get("figures", ())]
        return [self.folder / name for name in (*FILES, *figures) if (self.folder / name).is_file()]

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state, "why": self.why, "seconds": self.seconds, "command": self.command,
            "said": list(self.said), "flags": list(self.flags),
        }  # fmt: skip


def place(experiment: Experiment, report_dir: Path, found: Sequence[Path]) -> Path:
    """Its folder: under the report, else one of those that were made elsewhere (or a folder beneath one of them)."""
    own = report_dir / experiment.name
    if (own / "summary.json").is_file():
        return own
    for folder in found:
        for candidate in (folder, folder / experiment.name):
            if is_of(experiment, candidate):
                return candidate
    return own


def is_of(experiment: Experiment, folder: Path) -> bool:
    """Whether a run of this experiment left its summary there."""
    try:
        program = read_json(folder / "summary.json").get("program")
    except (CalmError, AttributeError):
        return False
    return bool(program == experiment.program)


def collected(experiment: Experiment, report_dir: Path, folder: Path, command: str, model: str) -> Found:
    """Read what is in its folder.

    Args:
        model: the checkpoint of the report, as summaries name it.
    """
    own = folder == report_dir / experiment.name
    ended = Runs(report_dir).ended(experiment.name, folder) if own else Ended(State.done.value)
    summary, why, state = None, ended.why, ended.state
    if (folder / "summary.json").is_file():
        try:
            summary = read_json(folder / "summary.json")
            summary["program"]  # noqa: B018
        except (CalmError, KeyError, TypeError) as error:
            summary, why, state = None, f"its summary.json cannot be read ({error})", State.failed.value
    elif state in (State.done.value, MISSING):
        why, state = _why_missing(experiment), MISSING
    elif state == State.running.value:
        why = "its run was cut off; call again to go on"
    flags = [] if summary is None else _flags(summary, model)
    said, panels = [], []
    if summary is not None:
        said, panels = _said(experiment.name, summary, flags), _panels(experiment.name, summary, flags)
    seconds = ended.seconds or float((summary or {}).get("wall_s", 0.0))
    return Found(experiment, state, why, command, folder, seconds, summary, said, panels, flags)


def _why_missing(experiment: Experiment) -> str:
    if not experiment.there:
        return f"its program {experiment.program} is not part of this version"
    return "it needs trainings of its own, which a report does not start" if experiment.trains else "it was not run"


def _flags(summary: Mapping[str, Any], model: str) -> list[str]:
    found = []
    if is_noisy(summary):
        found.append("noisy: a busy machine was timed; the speeds are not to be relied on")
    git = (summary.get("environment") or {}).get("git") or {}
    if git.get("dirty"):
        found.append("dirty: the code differed from its commit")
    failed = summary.get("failed")
    if isinstance(failed, dict) and failed:
        found.append(f"{len(failed)} trials failed: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    of = summary.get("checkpoint")
    if isinstance(of, str) and model and os.path.abspath(of) != os.path.abspath(model):
        found.append(f"of another model folder: {of}")
    return found


def _said(name: str, summary: Mapping[str, Any], flags: list[str]) -> list[str]:
    said = hook(name, "said")
    if said is None:
        return []
    try:
        return [str(text) for text in said(summary)]
    except STALE as error:
        flags.append(f"its numbers could not be put into words ({type(error).__name__}: {error})")
        return []


def _panels(name: str, summary: Mapping[str, Any], flags: list[str]) -> list[Any]:
    from calm.report_plots import FIGURES, panels_of

    if name not in FIGURES:
        return []
    try:
        return list(panels_of(name, summary))
    except STALE as error:
        flags.append(f"its figure could not be drawn ({type(error).__name__}: {error})")
        return []
