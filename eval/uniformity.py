"""Training rows of a batch to cross together, against the plain recipe at equal ROUGE-L.

    python -m eval.uniformity checkpoint=PLAIN uniform=[FOLDER,FOLDER]

Models of the same start and steps, trained with and without ``finetune.uniformity.weight`` (calm.uniformity), answer
the same test articles at several thresholds: each row for itself (``own``), and in batches under ``sync``
(Algorithm 1 of arXiv 2407.20272), where the slowest row says how deep a step goes. Compared are the layers that a token
runs where ROUGE-L is as far below the plain model's full depth, and the clock of a decode step at the shallowest
threshold that is no further below. Thresholds are compared on the articles that they are chosen on: nothing is
certified here. Writes summary.json, rows.parquet and the figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import BatchRule, Consistency, Measure
from calm.engine_config import served_numbers
from calm.errors import ConfigError, DataError
from calm.experiment_config import UniformityRunConfig

from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, say_columns
from .trials import Ledger, Row, Trial
from .uniformity_curves import Curve, at_equal_quality
from .way_clock import clock_rows
from .workload import model_dtype

if TYPE_CHECKING:
    from calm.policies import Policy
    from calm.records import Example
    from serve.engine import Engine
    from serve.model import ServedModel

UNIMPORTANT = ("checkpoint", "uniform", "attempts", "allow_noisy")
FULL, OWN, SYNC = "full", "own", "sync"
SHOWN = ("model", "measure", "rule", "batch", "threshold", "rouge_l", "layers", "crossing")


@dataclass(frozen=True)
class Asked:
    """What every trial needs; the first model is the plain one."""

    config: UniformityRunConfig
    models: "dict[str, ServedModel]"
    articles: "list[Example]"

    @cached_property
    def plain(self) -> str:
        return next(iter(self.models))

    def policies(self, model: str, measure: Measure) -> "dict[float, Policy]":
        """By threshold, descending.

        Raises:
            ConfigError: the model has no calibration of the measure, whose grid is wanted.
        """
        from .shallow_ways import thresholds

        found = [
            each for each in self.models[model].artifacts
            if (each.measure, each.consistency) == (measure, Consistency.risk)
        ]  # fmt: skip
        if not found:
            raise ConfigError(f"{model} has no calibration of {measure.value}; run python -m eval.calibrate on it")
        return {each: found[0].policy(each) for each in thresholds(found[0], None, self.config.points)}

    def engine(self, model: str, rule: BatchRule, batch: int) -> "Engine":
        from serve.engine import Engine
        from serve.options import EngineOptions, at_once

        weights = served_numbers(self.config.dtype)[1]
        options = EngineOptions(
            rule=rule, weights=weights, max_waiting=max(batch, len(self.articles)), **at_once(batch)
        )
        return Engine(self.models[model], options)


def run(config: UniformityRunConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.uniformity", config), choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load

    if not config.uniform:
        raise ConfigError("uniform=[] names no model to compare with; train one with finetune.uniformity.weight=3")
    folders = [folder, *(choose_model(each) for each in config.uniform)]
    models = {name: opened(config, each) for name, each in zip(labels(folders), folders, strict=True)}
    corpus, articles = articles_of(config.data, load(folder), config.n)
    if not articles:
        raise DataError(f"the test split of {corpus} is empty")
    told = {
        "models": {n: None if m.identity is None else m.identity.to_json() for n, m in models.items()},
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    asked = Asked(config, models, articles)
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; models: {', '.join(models)}")
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    answers = ledger.run(trials(asked), "uniformity", say)
    equal = compared(asked, answers.rows)
    clocks = ledger.run(clock_trials(asked, answers.rows), "clocks", say)
    keep(run_dir, answers.rows, clocks.rows)
    rows = averaged(config, answers.rows)
    say_columns(rows, SHOWN, digits=4, left=3)
    summary: dict[str, Any] = {
        **stamp.values(),
        "checkpoint": str(folder),
        "uniform": [str(each) for each in folders[1:]],
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "num_layers": models[asked.plain].spec.num_layers,
        "close": config.close,
        "noisy": any(row["noisy"] for row in clocks.rows),
        "rows": rows,
        "equal": equal,
        "clocks": [{k: v for k, v in row.items() if k not in ("full_s", "own_s")} for row in clocks.rows],
        "failed": {**answers.failed, **clocks.failed},
    }
    summary["figures"] = draw("uniformity", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if summary["failed"] else 0


def opened(config: UniformityRunConfig, folder: Path) -> "ServedModel":
    from calm.models.folder import load
    from serve.model import served

    return served(load(folder, dtype=model_dtype(config.dtype)), folder=folder)


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each: its folder, or the run's where that is called ``model``.

    Raises:
        ConfigError: two of one name.
    """
    names = [each.resolve().parent.name if each.name == "model" else each.name for each in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"two models have one name: {', '.join(names)}; rename a folder")
    return names


def trials(asked: Asked) -> list[Trial]:
    """Full depth of every model; every threshold under ``own`` and under ``sync`` at every batch size."""
    from calm.policies import Full

    most = max(asked.config.batches)
    ways: list[tuple[dict[str, Any], BatchRule, Policy]] = []
    for model in asked.models:
        values = {"model": model, "measure": FULL, "threshold": 1.0}
        ways.append(({**values, "rule": OWN, "batch": most}, BatchRule.own, Full()))
        for measure in asked.config.measures:
            for threshold, policy in asked.policies(model, measure).items():
                values = {"model": model, "measure": measure.value, "threshold": threshold}
                ways.append(({**values, "rule": OWN, "batch": most}, BatchRule.own, policy))
                ways += [
                    ({**values, "rule": SYNC, "batch": batch}, BatchRule.sync, policy) for batch in asked.config.batches
                ]
    return [
        Trial(values, lambda v=values, r=rule, p=policy: [answered(asked, v, r, p)])  # type: ignore[misc]
        for values, rule, policy in ways
    ]


def answered(asked: Asked, values: Mapping[str, Any], rule: BatchRule, policy: "Policy") -> Row:
    """Of every article: ROUGE-L, and layers summed over its tokens.

    Under ``sync`` a token runs as deep as its batch; under ``own`` as its own crossing.
    """
    from calm.metrics import rouge_l_many
    from serve.decoder import trace_of

    engine = asked.engine(values["model"], rule, values["batch"])
    traces = [trace_of(each) for each in engine.generate([a.source for a in asked.articles], policy=policy)]
    scores = rouge_l_many([t.text for t in traces], [a.target for a in asked.articles])
    return {
        "scores": [float(score) for score in scores],
        "layers": [sum(t.emission_layers) for t in traces],
        "crossing": [sum(t.crossing_layers) for t in traces],
        "tokens": [len(t.tokens) for t in traces],
    }


def curve(rows: Sequence[Row], model: str, measure: str, rule: str, batch: int | None) -> Curve | None:
    """Of a model; full depth is its first point. None where one of its decodes failed."""
    kept = [
        row for row in rows
        if row["model"] == model and (row["measure"] == FULL or (row["measure"], row["rule"]) == (measure, rule))
        and (row["measure"] == FULL or batch in (None, row["batch"]))
    ]  # fmt: skip
    return Curve.of(kept) if len(kept) > 1 and any(row["measure"] == FULL for row in kept) else None


def compared(asked: Asked, rows: Sequence[Row]) -> list[Row]:
    """Each uniform model against the plain one where their ROUGE-L is equal."""
    config, found = asked.config, list[Row]()
    ways: list[tuple[str, int | None]] = [(OWN, None), *((SYNC, batch) for batch in config.batches)]
    for model in [name for name in asked.models if name != asked.plain]:
        for measure in config.measures:
            for rule, batch in ways:
                plain, other = (curve(rows, name, measure.value, rule, batch) for name in (asked.plain, model))
                if plain is None or other is None:
                    continue
                values = at_equal_quality(plain, other, config.close, config.seed, config.bootstrap)
                found.append({"model": model, "measure": measure.value, "rule": rule, "batch": batch, **values})
    return found


def clock_trials(asked: Asked, rows: Sequence[Row]) -> list[Trial]:
    """A batch size each: under ``sync`` every model at its shallowest threshold that is close enough."""
    return [
        Trial({"clock": batch}, lambda b=batch: timed_at(asked, rows, b))  # type: ignore[misc]
        for batch in asked.config.batches
    ]


def timed_at(asked: Asked, rows: Sequence[Row], batch: int) -> list[Row]:
    """Raise CalmError as clock_rows does."""
    import numpy as np

    from calm.policies import Full

    from .clocks import Contender

    config = asked.config
    full = next(row for row in rows if (row["model"], row["measure"]) == (asked.plain, FULL))
    lowest = float(np.mean(full["scores"])) - config.close
    sources = [asked.articles[i % len(asked.articles)].source for i in range(batch)]
    engines = {name: asked.engine(name, BatchRule.sync, batch) for name in asked.models}

    def contender(name: str, model: str, policy: "Policy") -> Contender:
        return Contender(name, lambda n: engines[model].generate(sources, policy=policy, max_tokens=n, ignore_eos=True))

    contenders, told = [contender(FULL, asked.plain, Full())], {FULL: dict[str, Any]()}
    for model in asked.models:
        for measure in config.measures:
            near = [
                row for row in rows
                if (row["model"], row["measure"], row["rule"], row["batch"]) == (model, measure.value, SYNC, batch)
                and float(np.mean(row["scores"])) >= lowest
            ]  # fmt: skip
            if not near:
                continue
            best = min(near, key=lambda row: sum(row["layers"]) / sum(row["tokens"]))
            name = f"{model} {measure.value}"
            told[name] = {"model": model, "measure": measure.value, "threshold": best["threshold"]}
            contenders.append(contender(name, model, asked.policies(model, measure)[best["threshold"]]))
    found = clock_rows(contenders, config, f"batch {batch}")
    return [{**row, **told[row["way"]], "batch": batch} for row in found]


def averaged(config: UniformityRunConfig, rows: Sequence[Row]) -> list[Row]:
    """A row for each decode, without its articles."""
    from calm.metrics import with_interval

    found = []
    for row in rows:
        tokens = sum(row["tokens"])
        found.append(
            {
                **{name: row[name] for name in ("model", "measure", "rule", "batch", "threshold")},
                **with_interval("rouge_l", row["scores"], config.seed, config.bootstrap),
                "layers": sum(row["layers"]) / tokens,
                "crossing": sum(row["crossing"]) / tokens,
                "tokens": tokens,
            }
        )
    return found


def keep(run_dir: Path, answers: Sequence[Row], clocks: Sequence[Row]) -> None:
    """``rows.parquet``: scores and layers of every article; ``samples.parquet``: every reading of the clock."""
    import pandas as pd

    pd.DataFrame(answers).to_parquet(run_dir / "rows.parquet", compression="zstd")
    pd.DataFrame(clocks).to_parquet(run_dir / "samples.parquet", compression="zstd")


main = program("uniformity", UniformityRunConfig, run)

if __name__ == "__main__":
    main()
