"""Is adaptivity worth it? Exits beside fixed depths and beside models that were trained with fewer layers.

    python -m eval.shallow checkpoint=FOLDER [shallow=[FOLDER,FOLDER]]

Every way of decoding answers the same test articles to their ends: ROUGE-L, and in turns on one engine and machine its
clock, as eval.batching has it. A fixed depth of a model with exits costs nothing to have; a model of fewer layers needs
a training of its own (``python -m train checkpoint=FOLDER decoder_layers=4 finetune.loss=final_only``), and one of as
many layers shows what such a training brings by itself. Exits have thresholds of their calibration grid, the certified
one among them. Intervals of ROUGE-L are over articles, of clocks over rounds; of each training there is one. Writes
summary.json, rows.parquet (with the scores of all articles), samples.parquet and the figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.errors import CalibrationError, ConfigError, DataError
from calm.experiment_config import ShallowConfig

from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, say_columns
from .shallow_ways import EXIT, FULL, Way, engine_of, opened, ways
from .trials import Ledger, Row, Trial
from .workload import model_dtype

if TYPE_CHECKING:
    from calm.records import Example
    from serve.model import ServedModel

UNIMPORTANT = ("checkpoint", "shallow", "attempts")
SHOWN = ("way", "batch", "rouge_l", "rouge_l_minus_full", "layers", "decode_tokens_ratio", "tokens_ratio")


@dataclass(frozen=True)
class Asked:
    """What every trial needs."""

    config: ShallowConfig
    dtype: str
    ways: list[Way]
    articles: "list[Example]"


def run(config: ShallowConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.shallow", config), choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load
    from serve.model import served

    dtype = config.dtype or certified_dtype(config, folder)
    folders = [folder, *(choose_model(each) for each in config.shallow)]
    whole = load(folder, dtype=model_dtype(dtype))
    models = [served(whole, folder=folder), *(opened(each, dtype) for each in folders[1:])]
    check_tokenizers(folders, models)
    corpus, articles = articles_of(config.data, whole, config.n)
    if len(articles) < 2:
        raise DataError(f"the test split of {corpus} has {len(articles)} articles; two at least are needed")
    told = {
        "models": [None if model.identity is None else model.identity.to_json() for model in models],
        "rows_hash": hash_rows(articles),
        "dtype": dtype,
        "code": code_version(),
    }
    asked = Asked(config, dtype, ways(config, dtype, models[0], models[1:]), articles)
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; {len(asked.ways)} ways of decoding in {dtype}")
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
        "pairs": pairs(config, asked.ways, answered, timed),
        "failed": found.failed,
    }
    summary["figures"] = draw("shallow", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def certified_dtype(config: ShallowConfig, folder: Path) -> str:
    """That in which the engine of this machine has a certified threshold; fp32 where none is."""
    from calm.calibration import load_artifacts

    from .timed_folder import certified_way

    try:
        return certified_way(load_artifacts(folder), folder, config.tolerance)[1]
    except CalibrationError as error:
        say(f"{error}; decoded in fp32, and nothing is certified")
        return "fp32"


def check_tokenizers(folders: Sequence[Path], models: "Sequence[ServedModel]") -> None:
    """Raise ConfigError where another model reads other tokens: its tokens a second could not be compared."""
    for folder, model in zip(folders[1:], models[1:], strict=True):
        own, other = models[0].identity, model.identity
        if own is not None and other is not None and own.tokenizer != other.tokenizer:
            raise ConfigError(f"shallow: {folder} has another tokenizer than {folders[0]}")


def trials(asked: Asked) -> list[Trial]:
    """Quality of every way; then the clocks of a batch size, all ways in turn."""
    quality = [
        Trial(
            {"kind": "quality", "way": way.name, **way.values()},
            lambda w=way: [answered_by(asked, w)],  # type: ignore[misc]
            label=f"quality {way.name}",
        )
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

    config, count = asked.config, len(asked.articles)
    engine = engine_of(way.model, config.rule, asked.dtype, config.batch_size, count)
    traces = [trace_of(each) for each in engine.generate([a.source for a in asked.articles], policy=way.policy)]
    scores = rouge_l_many([t.text for t in traces], [each.target for each in asked.articles])
    layers = [layer for trace in traces for layer in trace.emission_layers]
    return {"layers": sum(layers) / len(layers), "tokens": len(layers), "scores": [float(score) for score in scores]}


def timed_at(asked: Asked, batch: int) -> list[Row]:
    """Every way in turn over the first articles, each on an engine of its own model.

    Raises:
        CalmError: the machine stays busy through all attempts and that is not allowed.
    """
    from .timed_folder import Turns, in_turns, own_clock

    config, first = asked.config, asked.articles[: asked.config.timed]
    engines = {
        id(way.model): own_clock(engine_of(way.model, config.rule, asked.dtype, batch, len(first)), config.threads)
        for way in asked.ways
    }
    sources = {id(way.model): [way.model.to_ids(each.source) for each in first] for way in asked.ways}
    turns = {way.name: Turns(engines[id(way.model)], sources[id(way.model)], way.policy) for way in asked.ways}
    noise = in_turns(turns, config).noise
    return [
        {
            "way": name,
            "runner": each.engine.runner_name.value,
            "noisy": noise.noisy,
            "foreign_cpu": noise.foreign,
            **each.rates,
        }
        for name, each in turns.items()
    ]


def joined(config: ShallowConfig, answered: dict[str, Row], timed: Sequence[Row]) -> list[Row]:
    """A row for each way and batch size: quality, its difference to full depth, clocks over full depth's."""
    import numpy as np

    from calm.metrics import with_interval

    from .timed_folder import rate_ratios

    if FULL not in answered:
        return []
    full = np.array(answered[FULL]["scores"])
    base = {row["batch"]: row for row in timed if row["way"] == FULL}
    found = []
    for clock in timed:
        own = answered.get(clock["way"])
        if own is None:
            continue
        scores = np.array(own["scores"])
        found.append(
            {
                **{name: value for name, value in own.items() if name not in ("scores", "kind")},
                "batch": clock["batch"],
                "rule": config.rule.value,
                **with_interval("rouge_l", scores, config.seed, config.bootstrap),
                **with_interval("rouge_l_minus_full", scores - full, config.seed, config.bootstrap),
                **rate_ratios(clock, base[clock["batch"]]),
            }
        )
    return found


def pairs(config: ShallowConfig, asked: Sequence[Way], answered: dict[str, Row], timed: Sequence[Row]) -> list[Row]:
    """Each exit at its chosen threshold against each way that is not adaptive: paired differences of both kinds."""
    import numpy as np

    from calm.metrics import with_interval

    from .timed_folder import rate_ratios

    clocks = {(row["way"], row["batch"]): row for row in timed}
    exits = [way for way in asked if way.role == EXIT and way.marked and way.name in answered]
    fixed = [way for way in asked if way.role not in (EXIT, FULL) and way.name in answered]
    found = []
    for one in exits:
        for other in fixed:
            gained = np.array(answered[one.name]["scores"]) - np.array(answered[other.name]["scores"])
            quality = with_interval("rouge_l_gained", gained, config.seed, config.bootstrap)
            for batch in dict.fromkeys(row["batch"] for row in timed):
                found.append(
                    {
                        "exit": one.name, "measure": one.values()["measure"], "threshold": one.threshold,
                        "tolerance": one.tolerance, "fixed": other.name, "role": other.role, "depth": other.depth,
                        "batch": batch, **quality, **rate_ratios(clocks[one.name, batch], clocks[other.name, batch]),
                    }
                )  # fmt: skip
    return found


def keep(run_dir: Path, answered: dict[str, Row], timed: Sequence[Row]) -> None:
    """``rows.parquet``: every article's score of every way; ``samples.parquet``: every round of the clock."""
    import pandas as pd

    scores = [{"way": name, "scores": row["scores"]} for name, row in answered.items()]
    pd.DataFrame(scores).to_parquet(run_dir / "rows.parquet", compression="zstd")
    pd.DataFrame(timed).to_parquet(run_dir / "samples.parquet", compression="zstd")


main = program("shallow", ShallowConfig, run)

if __name__ == "__main__":
    main()
