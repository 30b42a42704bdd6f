"""What eval.uniformity decodes: several models at thresholds of their grids, alone and in batches under ``sync``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, Measure
from calm.errors import ConfigError
from calm.experiment_config import UniformityRunConfig

from .shallow_ways import artifact_of, engine_of, thresholds
from .trials import Row

if TYPE_CHECKING:
    from calm.policies import Policy
    from calm.records import Example
    from serve.engine import Engine
    from serve.model import ServedModel

FULL, OWN, SYNC = "full", "own", "sync"
Chosen = Mapping[tuple[str, Measure], float]  # threshold by model and measure


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
            ConfigError: the model has no calibration of the measure, whose grid is wanted, or one threshold a layer.
        """
        found = artifact_of(self.models[model], measure, self.config.dtype)
        if found is None:
            raise ConfigError(f"{model} has no calibration of {measure.value}; run python -m eval.calibrate on it")
        artifact = found[0]
        if not all(isinstance(each, float) for each in artifact.grid):
            raise ConfigError(f"{model}: {measure.value} is calibrated per layer; one threshold is compared here")
        return {each: artifact.policy(each) for each in thresholds(artifact, None, self.config.points).values()}

    def engine(self, model: str, rule: BatchRule, batch: int) -> "Engine":
        return engine_of(self.models[model], rule, self.config.dtype, batch, len(self.articles))


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


def close_enough(asked: Asked, rows: Sequence[Row], batch: int) -> Chosen:
    """The threshold under ``sync`` with the fewest layers whose ROUGE-L is no more than ``close`` below the plain
    model's full depth; none of a model and measure that is always further below."""
    import numpy as np

    full = next(row for row in rows if (row["model"], row["measure"]) == (asked.plain, FULL))
    lowest, found = float(np.mean(full["scores"])) - asked.config.close, dict[tuple[str, Measure], float]()
    for model in asked.models:
        for measure in asked.config.measures:
            way = (model, measure.value, SYNC, batch)
            here = [row for row in rows if (row["model"], row["measure"], row["rule"], row["batch"]) == way]
            near = [row for row in here if float(np.mean(row["scores"])) >= lowest]
            if near:
                best = min(near, key=lambda row: sum(row["layers"]) / sum(row["tokens"]))
                found[model, measure] = best["threshold"]
    return found


def timed_at(asked: Asked, chosen: Chosen, batch: int) -> list[Row]:
    """Plain full depth and the chosen exits, in turn over the first articles.

    Raises:
        CalmError: the machine stays busy through all attempts and that is not allowed.
    """
    from calm.policies import Full

    from .timed_folder import Turns, in_turns, own_clock, rate_ratios

    config, first = asked.config, asked.articles[: asked.config.timed]
    engines = {m: own_clock(asked.engine(m, BatchRule.sync, batch), config.threads) for m in asked.models}
    sources = {m: [asked.models[m].to_ids(each.source) for each in first] for m in asked.models}
    told: dict[str, dict[str, Any]] = {FULL: {}}
    turns = {FULL: Turns(engines[asked.plain], sources[asked.plain], Full())}
    for (model, measure), threshold in chosen.items():
        name = f"{model} {measure.value}"
        told[name] = {"model": model, "measure": measure.value, "threshold": threshold}
        turns[name] = Turns(engines[model], sources[model], asked.policies(model, measure)[threshold])
    noise = in_turns(turns, config).noise
    rates = {name: each.rates for name, each in turns.items()}
    return [
        {"way": name, **told[name], "noisy": noise.noisy, **mine, **rate_ratios(mine, rates[FULL])}
        for name, mine in rates.items()
    ]
