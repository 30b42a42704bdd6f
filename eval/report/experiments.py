"""The experiments that a report brings together, in the order of its page.

Whatever of ``eval.<name>``, ``eval/said/<name>.py`` and calm.report_plots.FIGURES is there is used; an experiment
without a program is missing, and the page says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from calm.errors import ConfigError

CHECKPOINT, RECORDS, DATA = "checkpoint", "records", "data"
PACKAGE = __package__.partition(".")[0]


@dataclass(frozen=True)
class Experiment:
    """One of them.

    Attributes:
        question: that it answers.
        takes: of checkpoint, records and data, those of a program whose settings are not registered.
        trains: it compares trainings of its own; the report only collects it.
        module: default: ``eval.<name>``.
    """

    number: int
    name: str
    title: str
    question: str
    takes: tuple[str, ...] = (CHECKPOINT, DATA)
    trains: bool = False
    module: str = ""

    @property
    def program(self) -> str:
        return self.module or f"{PACKAGE}.{self.name}"

    @property
    def there(self) -> bool:
        """Whether its program is installed."""
        try:
            return find_spec(self.program) is not None
        except ModuleNotFoundError:  # of a package above it
            return False

    @property
    def settings(self) -> tuple[str, ...]:
        """Of checkpoint, records and data, those that it has."""
        from dataclasses import fields

        from calm.experiment_config import SCHEMAS

        if self.name not in SCHEMAS:
            return self.takes
        known = {each.name for each in fields(SCHEMAS[self.name])}
        return tuple(name for name in (CHECKPOINT, RECORDS, DATA) if name in known)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(11, "suitability", "Is the model suited?", "How much could this checkpoint gain from exits at all?"),
    Experiment(
        6, "thresholds", "Thresholds", "What do other thresholds cost in quality, and which layers do they skip?"
    ),
    Experiment(
        1, "batching", "Speed by batch size",
        "How fast is a decode step with exits beside full and static depth, by batch size and batch rule?",
    ),
    Experiment(
        2, "breakdown", "Where the time goes",
        "Which parts of a step keep the speed below what the skipped layers promise?",
    ),
    Experiment(
        4, "slowest_row", "Waiting for the slowest row",
        "How many of the skipped layers does a batch lose that waits for its slowest row?",
    ),
    Experiment(8, "grouping", "Grouping", "Does it help to batch texts of like depth?"),
    Experiment(
        3, "backfill", "Keys and values of skipped layers", "What are they worth, projected, copied, left out or true?"
    ),
    Experiment(
        14, "kv_budget", "A budget of their errors",
        "Does it help to run a token at full depth when the expected errors of filled keys and values add up?",
    ),
    Experiment(
        7, "invariance", "Batches and answers", "Does an answer depend on the batch that it is decoded in?"
    ),
    Experiment(
        10, "length", "Lengths", "How do the layers skipped and the gain go with the lengths of source and answer?",
    ),
    Experiment(
        5, "shallow", "Is adaptivity worth it?",
        "Are exits better than a fixed depth, or than a model that was trained with fewer layers?",
    ),
    Experiment(
        9, "uniformity", "Rows that cross together",
        "Does a batch stop earlier when its rows were trained to cross together, at equal quality?", trains=True,
    ),
    Experiment(
        13, "speculative", "Drafts that are checked",
        "Does it pay to let the first layers draft several words and the others check them at once, without loss?",
    ),
    Experiment(
        12, "skipdecode", "Layers by position",
        "What do fewer layers cost where the position says how many, beside exits by confidence?", trains=True,
    ),
)  # fmt: skip


def chosen(only: Sequence[str], skip: Sequence[str], named: Sequence[str] = ()) -> list[Experiment]:
    """Those asked for, in the order of the page.

    Raises:
        ConfigError: a name that none has, or nothing is left.
    """
    known = [each.name for each in EXPERIMENTS]
    for setting, names in (("only", only), ("skip", skip), ("overrides", named)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{setting}: {unknown[0]!r} is no experiment; there are {', '.join(sorted(known))}")
    found = [each for each in EXPERIMENTS if (not only or each.name in only) and each.name not in skip]
    if not found:
        raise ConfigError("only= and skip= leave no experiment")
    return found
