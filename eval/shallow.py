"""Is adaptivity worth it? Exits beside fixed depths and beside models that were trained with fewer layers.

    python -m eval.shallow checkpoint=FOLDER shallow=[FOLDER,FOLDER]

Of every way of decoding: ROUGE-L on the same test articles, and what a decode step takes in the same engine and run,
interleaved. A fixed depth of a model with exits costs nothing to have; a model trained with so many layers needs a
training of its own (``python -m train checkpoint=FOLDER decoder_layers=4 finetune.loss=final_only``). Exits have
thresholds of their calibration grid, the certified one among them. Writes summary.json, rows.parquet (with the scores
of all articles), samples.parquet and the figure.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.errors import ConfigError, DataError
from calm.experiment_config import ShallowConfig

from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, say_columns
from .shallow_ways import EXIT, FULL, Way, engine_of, ways
from .trials import Ledger, Row, Trial
from .way_clock import clock_rows
from .workload import model_dtype

if TYPE_CHECKING:
    from calm.records import Example
    from serve.model import ServedModel

UNIMPORTANT = ("checkpoint", "shallow", "attempts", "allow_noisy")
SHOWN = (
    "way",
    "batch",
    "rouge_l",
    "rouge_l_minus_full",
    "layers",
    "decode_tokens_ratio",
    "decode_tokens_ratio_low",
    "decode_tokens_ratio_high",
)


@dataclass(frozen=True)
class Asked:
    """What every trial needs."""

    config: ShallowConfig
    ways: list[Way]
    articles: "list[Example]"


def run(config: ShallowConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.shallow", config), choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.calibration.identity import code_version, hash_rows

    folders = [folder, *(choose_model(each) for each in config.shallow)]
    models = [opened(config, each) for each in folders]
    check_tokenizers(folders, models)
    corpus, articles = corpus_of(config, folder)
    told = {
        "models": [None if model.identity is None else model.identity.to_json() for model in models],
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    asked = Asked(config, ways(config, models[0], models[1:]), articles)
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; {len(asked.ways)} ways of decoding")
    found = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told}).run(trials(asked), "shallow", say)
    answered = {row["way"]: row for row in found.rows if row["kind"] == "quality"}
    timed = [row for row in found.rows if row["kind"] == "clock"]
    keep(run_dir, answered, timed)
    rows = joined(config, answered, timed)
    say_columns(rows, SHOWN, digits=4)
    summary: dict[str, Any] = {
        **stamp.values(),
        "checkpoint": str(folder),
        "shallow": [str(each) for each in folders[1:]],
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "num_layers": models[0].spec.num_layers,
        "tolerance": config.tolerance,
        "noisy": any(row["noisy"] for row in timed),
        "rows": rows,
        "pairs": pairs(config, asked.ways, answered, rows),
        "failed": found.failed,
    }
    summary["figures"] = draw("shallow", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def opened(config: ShallowConfig, folder: Path) -> "ServedModel":
    from calm.models.folder import load
    from serve.model import served

    return served(load(folder, dtype=model_dtype(config.dtype)), folder=folder)


def corpus_of(config: ShallowConfig, folder: Path) -> "tuple[str, list[Example]]":
    """Raise DataError where the test split is empty."""
    from calm.models.folder import load

    corpus, articles = articles_of(config.data, load(folder), config.n)
    if not articles:
        raise DataError(f"the test split of {corpus} is empty")
    return corpus, articles


def check_tokenizers(folders: Sequence[Path], models: "Sequence[ServedModel]") -> None:
    """Raise ConfigError where a shallow model reads other tokens: its answers could not be compared token by token."""
    for folder, model in zip(folders[1:], models[1:], strict=True):
        own, other = models[0].identity, model.identity
        if own is not None and other is not None and own.tokenizer != other.tokenizer:
            raise ConfigError(f"shallow: {folder} has another tokenizer than {folders[0]}")


def trials(asked: Asked) -> list[Trial]:
    """Quality of every way; then the clocks of a batch size, all ways in turn."""
    quality = [
        Trial({"kind": "quality", "way": way.name}, lambda w=way: [answered_by(asked, w)])  # type: ignore[misc]
        for way in asked.ways
    ]
    clocks = [
        Trial({"kind": "clock", "batch": batch}, lambda b=batch: timed_at(asked, b))  # type: ignore[misc]
        for batch in asked.config.batches
    ]
    return [*quality, *clocks]


def answered_by(asked: Asked, way: Way) -> Row:
    """ROUGE-L of every article to its reference, and how deep tokens went."""
    from calm.metrics import rouge_l_many
    from serve.decoder import trace_of

    config = asked.config
    engine = engine_of(config, way, config.batch_size, len(asked.articles))
    texts = [each.source for each in asked.articles]
    traces = [trace_of(a) for a in engine.generate(texts, policy=way.policy)]
    scores = rouge_l_many([t.text for t in traces], [each.target for each in asked.articles])
    layers = [layer for trace in traces for layer in trace.emission_layers]
    return {
        **{name: value for name, value in way.values().items() if name != "way"},
        "layers": sum(layers) / len(layers),
        "tokens": len(layers),
        "batch_size": config.batch_size,
        "scores": [float(score) for score in scores],
    }


def timed_at(asked: Asked, batch: int) -> list[Row]:
    """Every way in turn on one batch of articles, each on an engine of its own model.

    Raises:
        CalmError: as clock_rows does.
    """
    from .clocks import Contender

    config = asked.config
    sources = [asked.articles[i % len(asked.articles)].source for i in range(batch)]
    engines = {id(way.model): engine_of(config, way, batch) for way in asked.ways}

    def contender(way: Way) -> Contender:
        engine = engines[id(way.model)]
        return Contender(way.name, lambda n: engine.generate(sources, policy=way.policy, max_tokens=n, ignore_eos=True))

    rows = clock_rows([contender(way) for way in asked.ways], config, f"batch {batch}")
    runner = engines[id(asked.ways[0].model)].runner_name.value
    return [{**row, "runner": runner} for row in rows]


def joined(config: ShallowConfig, answered: dict[str, Row], timed: Sequence[Row]) -> list[Row]:
    """A row for each way and batch size: quality with its interval, difference to full depth, clock."""
    import numpy as np

    from calm.metrics import with_interval

    if FULL not in answered or not timed:
        return []
    full, found = np.array(answered[FULL]["scores"]), []
    for clock in timed:
        own = answered.get(clock["way"])
        if own is None:
            continue
        scores = np.array(own["scores"])
        found.append(
            {
                **{name: value for name, value in own.items() if name not in ("scores", "kind")},
                "batch": clock["batch"],
                **with_interval("rouge_l", scores, config.seed, config.bootstrap),
                **with_interval("rouge_l_minus_full", scores - full, config.seed, config.bootstrap),
                **{
                    name: clock[name]
                    for name in (
                        "decode_tokens_ratio",
                        "decode_tokens_ratio_low",
                        "decode_tokens_ratio_high",
                        "call_over_full",
                    )
                },
                "step_s": statistics.median(clock["own_s"]),
            }
        )
    return found


def pairs(config: ShallowConfig, asked: Sequence[Way], answered: dict[str, Row], rows: Sequence[Row]) -> list[Row]:
    """Each exit at its chosen threshold against each way that is not adaptive: paired difference, ratio of clocks."""
    import numpy as np

    from calm.metrics import with_interval

    clocks = {(row["way"], row["batch"]): row["decode_tokens_ratio"] for row in rows}
    exits = [way for way in asked if way.role == EXIT and way.marked and way.name in answered]
    fixed = [way for way in asked if way.role not in (EXIT, FULL) and way.name in answered]
    found = []
    for one in exits:
        for other in fixed:
            gained = np.array(answered[one.name]["scores"]) - np.array(answered[other.name]["scores"])
            for batch in dict.fromkeys(row["batch"] for row in rows):
                found.append(
                    {
                        "exit": one.name, "fixed": other.name, "role": other.role, "batch": batch,
                        **with_interval("rouge_l_gained", gained, config.seed, config.bootstrap),
                        "speed_ratio": clocks[one.name, batch] / clocks[other.name, batch],
                    }
                )  # fmt: skip
    return found


def keep(run_dir: Path, answered: dict[str, Row], timed: Sequence[Row]) -> None:
    """``rows.parquet``: every article's score of every way; ``samples.parquet``: every reading of the clock."""
    import pandas as pd

    scores = [{"way": name, "scores": row["scores"]} for name, row in answered.items()]
    pd.DataFrame(scores).to_parquet(run_dir / "rows.parquet", compression="zstd")
    pd.DataFrame(timed).to_parquet(run_dir / "samples.parquet", compression="zstd")


main = program("shallow", ShallowConfig, run)

if __name__ == "__main__":
    main()
