"""Answers that eval.table1 recorded: what every row-exact schedule of them would do, without decoding again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from calm.config import DataConfig
from calm.errors import ConfigError, DataError

from .common import articles_of, say

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import Example


@dataclass(frozen=True)
class Recorded:
    """A run of eval.table1.

    Attributes:
        summary: its summary.json.
        crossing: by row of the table, (articles, longest answer): crossing layer of each token, 0 after its end.
    """

    folder: Path
    summary: dict[str, Any]
    crossing: dict[str, Int[np.ndarray, "articles tokens"]]

    @property
    def model_folder(self) -> Path | None:
        """Of the recorded model: that beside the records, else the one they name; None where neither is there."""
        named = [self.folder / "model", Path(self.summary.get("checkpoint", "model"))]
        return next((folder for folder in named if (folder / "early_exit.json").is_file()), None)

    @property
    def num_layers(self) -> int:
        """Of the decoder: what full depth runs."""
        return int(self.crossing["full"].max())

    @property
    def certified(self) -> list[str]:
        """Rows whose threshold is certified for a tolerance."""
        return [row["row"] for row in self.summary["table1"] if row["tolerance"] is not None]

    def chosen(self, asked: Sequence[str]) -> list[str]:
        """The rows asked for; without any the certified ones.

        Raises:
            ConfigError: a row that the table has not, or none is certified.
        """
        names = list(asked) or self.certified
        if not names:
            raise ConfigError(f"no row of {self.folder} is certified; name some with rows=[...]")
        unknown = [name for name in names if name not in self.crossing]
        if unknown:
            raise ConfigError(f"rows: {unknown[0]!r} is none of {', '.join(self.crossing)}")
        return names


@dataclass(frozen=True)
class Answers:
    """A row of the table, article by article.

    Attributes:
        ids: of the articles, in the order of the records.
        emission: (articles, longest answer): layer that gave each token, 0 after its end.
        loss: 1 - ROUGE-L to full depth's answer, in [0, 1].
    """

    ids: list[str]
    emission: Int[np.ndarray, "articles tokens"]
    loss: Float[np.ndarray, " articles"]

    @property
    def lengths(self) -> Int[np.ndarray, " articles"]:
        """Tokens of each answer, EOS included."""
        found: Int[np.ndarray, " articles"] = (self.emission > 0).sum(axis=1)
        return found


def newest(root: Path = Path("runs")) -> Path:
    """Raise ConfigError where no run of eval.table1 has left its records."""
    found = [path.parent for path in root.rglob("records.parquet") if (path.parent / "summary.json").is_file()]
    if not found:
        raise ConfigError(
            f"no records= was given and no run of eval.table1 is under {root}/; run python -m eval.table1, or give "
            "records=FOLDER"
        )
    return max(found, key=lambda folder: (folder / "records.parquet").stat().st_mtime)


def read_records(folder: str | None) -> Recorded:
    """The run asked for, or the newest under ``runs/``; says which.

    Raises:
        ConfigError: there is none.
        DataError: the folder holds no records of eval.table1.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = Path(folder) if folder is not None else newest()
    try:
        summary: dict[str, Any] = json.loads((where / "summary.json").read_text("utf-8"))
        summary["table1"]  # noqa: B018
        table = pq.read_table(where / "records.parquet", columns=["row", "crossing_layers"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{where} holds no summary.json and records.parquet of eval.table1 ({error})") from None
    say(f"records: {where}")
    names, layers = table["row"].to_pylist(), table["crossing_layers"].to_pylist()
    by_row: dict[str, list[list[int]]] = {}
    for name, depths in zip(names, layers, strict=True):
        if depths is not None:  # the first sentence is not decoded
            by_row.setdefault(name, []).append(depths)
    if "full" not in by_row:
        raise DataError(f"{where}: its records have no row of full depth")
    return Recorded(where, summary, {name: padded(answers) for name, answers in by_row.items()})


def recorded_articles(recorded: Recorded, model: "SpeakingModel", advice: str = "") -> "tuple[str, list[Example]]":
    """Name of the corpus, and the test articles that were recorded, in the order of the records.

    Args:
        advice: what to do where one is lacking, at the end of the error.

    Raises:
        DataError: the corpus cannot be read, or lacks one of them.
    """
    data = recorded.summary.get("config", {}).get("data")
    corpus, examples = articles_of(None if data is None else DataConfig.from_values(data), model)
    by_id, ids = {example.id: example for example in examples}, read_answers(recorded, "full").ids
    lacking = [each for each in ids if each not in by_id]
    if lacking:
        raise DataError(f"{corpus} has no test article {lacking[0]!r} of the records{advice}")
    return corpus, [by_id[each] for each in ids]


def policy_of(entry: Mapping[str, Any], longest: int) -> "Policy":
    """What a row of the table asked of its requests.

    Raises:
        DataError: it asked no confidence.
    """
    from calm.config import Measure, Schedule
    from calm.policies import Confident
    from calm.thresholds import ThresholdSchedule

    if not entry.get("measure") or entry.get("threshold") is None or not entry.get("schedule"):
        raise DataError(f"row {entry['row']!r} of the records has no measure and threshold to be timed at")
    threshold = entry["threshold"]
    value = tuple(threshold) if isinstance(threshold, list) else float(threshold)
    schedule = ThresholdSchedule(value, Schedule(entry["schedule"]), length=longest)
    return Confident(Measure(entry["measure"]), schedule)


def read_answers(recorded: Recorded, name: str) -> Answers:
    """Answers of a row of the table that was decoded.

    Raises:
        DataError: the records do not say what they lost, or have an article twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, columns = recorded.folder / "records.parquet", ["id", "emission_layers", "rouge_l_to_full"]
    try:
        table = pq.read_table(path, columns=columns, filters=[("row", "=", name)])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} has no ids, layers and ROUGE-L to full depth of eval.table1 ({error})") from None
    ids = [str(each) for each in table["id"].to_pylist()]
    if len(set(ids)) < len(ids):
        raise DataError(f"{path}: an article of row {name!r} is there twice")
    loss = 1.0 - np.asarray(table["rouge_l_to_full"].to_pylist(), dtype=np.float64)
    if not np.isfinite(loss).all():
        raise DataError(f"{path}: an article of row {name!r} has no ROUGE-L to full depth")
    return Answers(ids, padded(table["emission_layers"].to_pylist()), loss)


def padded(answers: list[list[int]]) -> Int[np.ndarray, "articles tokens"]:
    """Layers of each token, 0 where an answer is over."""
    longest = max(map(len, answers), default=0)
    table = np.zeros((len(answers), longest), dtype=np.int64)
    for number, layers in enumerate(answers):
        table[number, : len(layers)] = layers
    return table
