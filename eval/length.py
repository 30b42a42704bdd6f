"""Layers skipped, loss and gain against the length of source and answer.

    python -m eval.length records=results/debian_tiny

Of recorded answers (rows of part ``records``; nothing is decoded): layers skipped and loss against full depth by
quartile of source length and of full depth's answer length, layers skipped by position in the answer. By a measured
cost table (rows of part ``predicted``): how many times as fast a decode step and a whole call of a shape with random
weights would be with exits, at other lengths. Those are predictions, no timings. Writes summary.json, rows.parquet and
the figure.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from calm.cli import program
from calm.errors import DataError
from calm.experiment_config import LengthConfig

from .common import Stamp, finish, plain, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .length_predicted import Predictor
from .length_records import (
    HALVES,
    OUTPUT,
    POSITION,
    SOURCE,
    SourceTokens,
    by_halves,
    by_length,
    by_position,
    source_tokens,
)
from .recorded import Recorded, read_answers, read_records
from .trials import Ledger, Trial

RECORDS, PREDICTED = "records", "predicted"
SHOWN = {
    RECORDS: (
        "row",
        "by",
        "group",
        "shortest",
        "longest",
        "articles",
        "layers_skipped",
        "loss",
        "late_minus_early",
        "inner_late_minus_early",
    ),  # fmt: skip
    PREDICTED: ("source", "batch", "tokens", "step_ratio", "call_ratio", "prefill_share"),
}


def run(config: LengthConfig, run_dir: Path) -> int:
    stamp, recorded = Stamp("eval.length", config), read_records(config.records)
    sources = source_tokens(config, recorded)
    asked = {**plain(config), "records": recorded.summary["started"]}
    todo = [*recorded_trials(config, recorded, sources), *predicted_trials(config)]
    found = Ledger(run_dir, asked).run(todo, "length", say)
    rows = keep_rows(found, run_dir)
    for part, columns in SHOWN.items():
        shown = [row for row in rows if row["part"] == part]
        say_columns(shown, columns, digits=3, left=2) if shown else say(f"{part}: nothing")
    say("step_ratio, call_ratio: full depth / exits, predicted by a measured cost table")
    summary = {
        **stamp.values(),
        "records": str(recorded.folder),
        "num_layers": recorded.num_layers,
        "source_tokens_read": None if sources is None else sources.most,
        "schedules": {row["row"]: row.get("schedule") for row in recorded.summary["table1"]},
        "predicted_by": "a measured cost table and calm.simulate; no call was timed",
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("length", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def recorded_trials(config: LengthConfig, recorded: Recorded, sources: SourceTokens | None) -> Iterator[Trial]:
    """Each row of the table by each kind of length; by source only where the lengths are known.

    Raises:
        ConfigError: a row that the table has not, or none is certified.
    """
    measured = {OUTPUT: by_output, POSITION: by_position_of, HALVES: by_halves_of}
    for name in recorded.chosen(config.rows):
        if sources is not None:
            values = {"part": RECORDS, "row": name, "by": SOURCE}
            yield Trial(values, lambda n=name, s=sources: by_source(config, recorded, n, s))  # type: ignore[misc]
        for kind, measure in measured.items():
            values = {"part": RECORDS, "row": name, "by": kind}
            yield Trial(values, lambda n=name, m=measure: m(config, recorded, n))  # type: ignore[misc]


def predicted_trials(config: LengthConfig) -> Iterator[Trial]:
    """Each source length and batch size."""
    predictor = Predictor(config)
    for batch in config.batches:
        for source in config.sources:
            values = {"part": PREDICTED, "source": source, "batch": batch}
            yield Trial(values, lambda s=source, b=batch: predictor.rows(s, b))  # type: ignore[misc]


def by_source(config: LengthConfig, recorded: Recorded, name: str, sources: SourceTokens) -> list[dict[str, Any]]:
    answers = read_answers(recorded, name)
    return by_length(answers, sources.of(answers.ids), recorded.num_layers, config, sources.most)


def by_output(config: LengthConfig, recorded: Recorded, name: str) -> list[dict[str, Any]]:
    """Raise DataError where full depth did not answer the same articles."""
    answers, full = read_answers(recorded, name), read_answers(recorded, "full")
    lengths = dict(zip(full.ids, full.lengths, strict=True))
    if set(lengths) != set(answers.ids):
        raise DataError(f"{recorded.folder}: rows {name!r} and 'full' are of different articles")
    return by_length(answers, np.array([lengths[each] for each in answers.ids]), recorded.num_layers, config)


def by_position_of(config: LengthConfig, recorded: Recorded, name: str) -> list[dict[str, Any]]:
    return by_position(read_answers(recorded, name), recorded.num_layers, config)


def by_halves_of(config: LengthConfig, recorded: Recorded, name: str) -> list[dict[str, Any]]:
    return by_halves(read_answers(recorded, name), recorded.num_layers, config)


main = program("length", LengthConfig, run)

if __name__ == "__main__":
    main()
