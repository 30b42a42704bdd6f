"""What a report runs where, with which settings."""

from collections.abc import Sequence
from pathlib import Path

from calm.cli import job_overrides
from calm.errors import ConfigError
from calm.experiment_config import ReportConfig

from ..common import say
from ..trials import State
from .collect import Found, collected, place
from .experiments import CHECKPOINT, DATA, PACKAGE, RECORDS, Experiment
from .runner import Runs, Step, model_hash, table1_folder

TABLE1 = "table1"


class Plan:
    """What is run where, with which settings.

    Attributes:
        records: folder of a run of eval.table1: given, found above the checkpoint, or made here first.

    Raises:
        ConfigError: ``records`` is no such folder, or one of ``found`` is none.
    """

    def __init__(self, config: ReportConfig, model: Path, run_dir: Path, corpus: Sequence[str]) -> None:
        self.config, self.model, self.run_dir, self.corpus = config, model, near(run_dir), tuple(corpus)
        self._about = model_hash(model)
        self.found = [Path(folder).expanduser() for folder in config.found]
        for folder in self.found:
            if not folder.is_dir():
                raise ConfigError(f"found: there is no folder {folder}")
        above = model.parent
        own_corpus = config.data is None  # what was recorded above the checkpoint is of the corpus it was trained on
        if config.records is not None:
            self.records = Path(config.records)
            if not table1_folder(self.records):
                raise ConfigError(f"records={config.records} holds no summary.json and records.parquet of eval.table1")
        elif own_corpus and table1_folder(above):
            self.records = above
        else:
            self.records = self.run_dir / TABLE1

    @property
    def has_records(self) -> bool:
        return table1_folder(self.records)

    def folder(self, experiment: Experiment) -> Path:
        return self.run_dir / experiment.name

    def place(self, experiment: Experiment) -> Path:
        """Its own folder, or one where it was found."""
        return place(experiment, self.run_dir, self.found)

    def collected(self, experiment: Experiment) -> Found:
        """What is there of it."""
        return collected(
            experiment, self.run_dir, self.place(experiment), self.step(experiment).command, str(self.model)
        )

    def step(self, experiment: Experiment) -> Step:
        given = {
            CHECKPOINT: [f"checkpoint={self.model}"],
            RECORDS: [f"records={self.records}"],
            DATA: list(self.corpus),
        }
        argv = [text for name in experiment.settings for text in given[name]]
        argv += self.config.overrides.get(experiment.name, ())
        return self._step(experiment.name, experiment.program, argv)

    def table1(self) -> Step:
        return self._step(TABLE1, f"{PACKAGE}.table1", [f"checkpoint={self.model}", *self.corpus])

    def _step(self, name: str, module: str, argv: Sequence[str]) -> Step:
        return Step(name, module, tuple(argv), self.run_dir / name, self._about)


def near(folder: Path) -> Path:
    """The same from the working directory, where it lies below: as commands and records name it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_absolute() and folder.is_relative_to(here) else folder


def run_all(plan: Plan, experiments: Sequence[Experiment]) -> None:
    """In their order; Table 1 before them where its records are needed and not there."""
    runs = Runs(plan.run_dir)
    todo = [each for each in experiments if each.there and not each.trains]
    needs = any(RECORDS in each.settings for each in todo)
    steps = [plan.table1()] if needs and plan.records == plan.run_dir / TABLE1 else []
    steps += [plan.step(each) for each in todo]
    for number, step in enumerate(steps, start=1):
        known = runs.is_done(step)
        say(f"[{number}/{len(steps)}] {step.name}{': done before' if known else ''}")
        ended = runs.run(step, plan.config.minutes)
        if ended.state != State.done.value:
            say(f"{step.name}: failed: {ended.why} (all of it in {step.folder / 'log.txt'})")
        elif not known:
            say(f"{step.name}: done in {ended.seconds:.0f} s")


def corpus_overrides() -> list[str]:
    """What chose the corpus on the command line of this job, for other programs."""
    keys = [(text, text.lstrip("+~").partition("=")[0]) for text in job_overrides()]
    return [text for text, key in keys if key == "data" or key.startswith(("data.", "hydra.searchpath"))]
