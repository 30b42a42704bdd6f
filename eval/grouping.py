"""What it brings to put requests of like depth into one batch, and what that costs in waiting.

    python -m eval.grouping records=results/debian_tiny

A step runs as deep as its slowest row, also under the row-exact ``own``. arXiv 2407.20272 leaves open whether batches
of like difficulty help. From recorded answers, nothing decoded again: layers that steps run where requests come in
random order; are sorted, in windows of a pool of batches, by a regression on the encoder's output
(eval/grouping_predictor.py), by source length, or by the true mean depth (``oracle``); or where a pool of batches runs
at once and every round puts rows together whose last exits were alike (``online``) or whose next will be (``step
oracle``). Tokens per second over full depth by a cost table measured in this run (part ``counted``); a few points are
timed in the engine (``timed``).
Writes summary.json, rows.parquet and the figure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.cli import program
from calm.config import Measure
from calm.errors import DataError
from calm.experiment_config import GroupingConfig

from .common import Stamp, choose_model, finish, plain, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .grouping_counted import ENCODER, LENGTH, OWN, Known, counted
from .grouping_predictor import between, binned, cross_fitted, pooled, worth
from .grouping_timed import Timed
from .recorded import Recorded, policy_of, read_answers, read_records, recorded_articles
from .said.grouping import said
from .trials import Ledger, Trial

if TYPE_CHECKING:
    from calm.models.t5 import EarlyExitT5

PREDICTOR, BINS, COUNTED, TIMED = "predictor", "bins", "counted", "timed"
SHOWN = {
    PREDICTOR: ("row", "key", "r2", "r2_low", "r2_high", "rank", "rank_low", "rank_high", "between"),
    COUNTED: ("row", "batch", "grouping", "pool", "step_layers", "saved", "saved_low", "saved_high", "gain",
              "wait_requests", "later_steps"),
    TIMED: ("row", "batch", "rule", "grouping", "step_layers", "predicted_step_layers", "gain", "predicted_gain",
            "as_recorded"),
}  # fmt: skip


def run(config: GroupingConfig, run_dir: Path) -> int:
    stamp, recorded = Stamp("eval.grouping", config), read_records(config.records)
    names = rows_of(config, recorded)
    from calm.calibration.identity import hash_rows

    articles = Articles.of(config, recorded, names)
    asked = {**plain(config), "records": recorded.summary["started"], "articles": hash_rows(articles.examples)}
    ledger = Ledger(run_dir, {**asked, "weights": articles.weights})
    found = ledger.run(list(trials(config, recorded, names, articles, ledger.folder)), "grouping", say)
    rows = keep_rows(found, run_dir)
    for part, columns in SHOWN.items():
        shown = [
            row for row in rows if row["part"] == part and row.get("rule") in (None, OWN, "sync", "full", "static")
        ]
        shown = [row for row in shown if part != COUNTED or row["rule"] == OWN]
        say_columns(shown, columns, digits=3) if shown else say(f"{part}: nothing")
    summary = {
        **stamp.values(),
        "records": str(recorded.folder),
        "checkpoint": str(articles.folder),
        "corpus": articles.corpus,
        "articles": len(articles.examples),
        "num_layers": recorded.num_layers,
        "mean_depth": {name: articles.known[name].mean_depth for name in names},
        "predicted_by": "a cost table measured in this run; part timed was timed",
        "rows": rows,
        "failed": found.failed,
    }
    for sentence in said(summary):
        say(sentence)
    summary["figures"] = draw("grouping", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def rows_of(config: GroupingConfig, recorded: Recorded) -> list[str]:
    """The rows asked for, else the certified one that dev picked and ``state`` where it is certified.

    Raises:
        ConfigError: a row that the table has not, or none is certified.
    """
    table = recorded.summary["table1"]
    picked = [row["row"] for row in table if row.get("picked") and row["row"] in recorded.certified]
    state = [name for name in recorded.certified if name == "state" and name not in picked]
    return recorded.chosen(config.rows or picked + state)


@dataclass(frozen=True)
class Articles:
    """The recorded articles and the model that answered them.

    Attributes:
        known: by row of the table.
        weights: hash of what the model consists of.
    """

    folder: Path
    corpus: str
    model: "EarlyExitT5"
    examples: list[Any]
    sources: list[list[int]]
    known: dict[str, Known]
    weights: str

    @classmethod
    def of(cls, config: GroupingConfig, recorded: Recorded, names: list[str]) -> "Articles":
        """Read the corpus and tell every article's key.

        Raises:
            CheckpointError, DataError: the model or the corpus cannot be read, or holds other articles.
        """
        import torch

        from calm.data.text import encode_source
        from calm.models.folder import load
        from calm.models.t5 import t5_only

        from .layer_answers import weights_hash

        torch.set_num_threads(config.threads)
        folder = choose_model(config.checkpoint or str(recorded.model_folder or recorded.summary["checkpoint"]))
        model = t5_only(load(folder), "eval.grouping")
        answers = {name: read_answers(recorded, name) for name in names}
        corpus, examples = recorded_articles(recorded, model, "; give their checkpoint=")
        ids = [example.id for example in examples]
        sources = [encode_source(model.tokenizer, example.source, model.settings) for example in examples]
        features, lengths = pooled(model, sources), np.array([len(each) for each in sources])
        known, table = dict[str, Known](), {row["row"]: row for row in recorded.summary["table1"]}
        for name in names:
            places = {each: number for number, each in enumerate(answers[name].ids)}
            if set(places) != set(ids):
                raise DataError(f"{recorded.folder}: rows {name!r} and 'full' are of different articles")
            crossing = recorded.crossing[name][[places[each] for each in ids]]
            depth = crossing.sum(axis=1) / np.maximum(1, (crossing > 0).sum(axis=1))
            keys = {
                ENCODER: cross_fitted(features, depth, config.folds, config.seed),
                LENGTH: lengths.astype(np.float64),
            }
            measure = table[name].get("measure")
            asks = frozenset({Measure(measure)}) if measure else frozenset[Measure]()
            known[name] = Known(name, recorded.num_layers, asks, crossing, recorded.crossing["full"], keys, lengths)
        return cls(folder, corpus, model, examples, sources, known, weights_hash(folder))


def trials(
    config: GroupingConfig, recorded: Recorded, names: list[str], articles: Articles, folder: Path
) -> Iterator[Trial]:
    """What the predictor is worth, each batch size counted, and of the first row a few timed.

    Args:
        folder: of the ledger; cost tables are kept there.

    Raises:
        DataError: the first row asks no confidence, so that it cannot be timed.
    """
    asked = sorted({known.measures for known in articles.known.values() if known.measures}, key=sorted)
    timed = Timed(config, _served(articles), articles.sources, asked, folder)
    for name in names:
        known = articles.known[name]
        yield Trial({"part": PREDICTOR, "row": name}, lambda k=known: predictor_of(config, k))  # type: ignore[misc]
        yield Trial({"part": BINS, "row": name}, lambda k=known: bins_of(config, k))  # type: ignore[misc]
    for name in names:
        for batch in config.batches:
            values = {"part": COUNTED, "row": name, "batch": batch}
            yield Trial(
                values,
                lambda k=articles.known[name], b=batch: counted(config, k, lambda: timed.prices(b), b),  # type: ignore[misc]
            )
    entry = next(row for row in recorded.summary["table1"] if row["row"] == names[0])
    for batch in config.timed_batches:
        policy = policy_of(entry, articles.model.settings.max_target_tokens)
        values = {"part": TIMED, "row": names[0], "batch": batch}
        yield Trial(
            values,
            lambda b=batch, p=policy: timed.compared(articles.known[names[0]], p, b),  # type: ignore[misc]
        )


def predictor_of(config: GroupingConfig, known: Known) -> list[dict[str, Any]]:
    """For each key how well it tells an answer's mean depth. A length is no prediction: it has a rank correlation."""
    share = between(known.crossing)
    found: list[dict[str, Any]] = []
    for key, values in known.keys.items():
        told = worth(values, known.depth, config.seed, config.bootstrap)
        if key != ENCODER:
            told = {name: value for name, value in told.items() if not name.startswith("r2")}
        found.append({"key": key, "articles": len(values), "between": share, **told})
    return found


def bins_of(config: GroupingConfig, known: Known) -> list[dict[str, Any]]:
    return binned(known.keys[ENCODER], known.depth, config.bins, config.seed, config.bootstrap)


def _served(articles: Articles) -> Any:
    from serve.model import served

    return served(articles.model, folder=articles.folder)


main = program("grouping", GroupingConfig, run)

if __name__ == "__main__":
    main()
