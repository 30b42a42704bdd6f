"""Answers that eval.table1 recorded: what every row-exact schedule of them would do, without decoding again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from calm.errors import ConfigError, DataError

from .common import say

NEEDED = ("id", "row", "crossing_layers", "emission_layers")


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
    def num_layers(self) -> int:
        """Of the decoder: what full depth runs."""
        return int(self.crossing["full"].max())

    @property
    def certified(self) -> list[str]:
        """Rows whose threshold is certified for a tolerance."""
        return [row["row"] for row in self.summary["table1"] if row["tolerance"] is not None]


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
        table = pq.read_table(where / "records.parquet", columns=list(NEEDED))
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


def padded(answers: list[list[int]]) -> Int[np.ndarray, "articles tokens"]:
    """Layers of each token, 0 where an answer is over."""
    longest = max(map(len, answers), default=0)
    table = np.zeros((len(answers), longest), dtype=np.int64)
    for number, layers in enumerate(answers):
        table[number, : len(layers)] = layers
    return table
