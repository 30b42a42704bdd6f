"""Training rows of a batch to cross together, against the plain recipe at equal ROUGE-L.

    python -m eval.uniformity checkpoint=PLAIN uniform=[FOLDER,FOLDER]

Models of the same start and steps, trained with and without ``finetune.uniformity.weight`` (calm.uniformity), answer
the same test articles at several thresholds: each row for itself (``own``), and in batches under ``sync``
(Algorithm 1 of arXiv 2407.20272), where the slowest row says how deep a step goes. Compared are the layers that a token
runs where ROUGE-L is as far below the plain model's full depth, and the clock at the threshold with the fewest layers
that is no further below. Thresholds are compared on the articles that they are chosen on, and of each recipe there is
one training: nothing is certified here. Writes summary.json, rows.parquet and the figure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.calibration.identity import hash_json
from calm.cli import program
from calm.config import BatchRule
from calm.errors import ConfigError, DataError
from calm.experiment_config import UniformityRunConfig

from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, say_columns
from .shallow_ways import opened
from .trials import Ledger, Row, Trial
from .uniformity_curves import Curve, at_equal_quality
from .uniformity_ways import FULL, OWN, SYNC, Asked, answered, close_enough, timed_at
from .workload import model_dtype

if TYPE_CHECKING:
    from calm.policies import Policy

UNIMPORTANT = ("checkpoint", "uniform", "attempts")
SHOWN = ("model", "measure", "rule", "batch", "threshold", "rouge_l", "layers", "crossing")


def run(config: UniformityRunConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.uniformity", config), choose_model(config.checkpoint)
    import torch

    torch.set_num_threads(config.threads)
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load
    from serve.model import served

    if not config.uniform:
        raise ConfigError("uniform=[] names no model to compare with; train one with finetune.uniformity.weight=3")
    folders = [folder, *(choose_model(each) for each in config.uniform)]
    names = labels(folders)
    whole = load(folder, dtype=model_dtype(config.dtype))
    models = {names[0]: served(whole, folder=folder)}
    models |= {name: opened(each, config.dtype) for name, each in zip(names[1:], folders[1:], strict=True)}
    corpus, articles = articles_of(config.data, whole, config.n)
    if len(articles) < 2:
        raise DataError(f"the test split of {corpus} has {len(articles)} articles; two at least are needed")
    told = {
        "models": {n: None if m.identity is None else m.identity.to_json() for n, m in models.items()},
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    asked = Asked(config, models, articles)
    say(f"corpus: {corpus}, {len(articles)} articles of the test split; models: {', '.join(models)}")
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    answers = ledger.run(trials(asked), "uniformity", say)
    clocks = ledger.run(clock_trials(asked, answers.rows), "clocks", say)
    keep(run_dir, answers.rows, clocks.rows)
    rows = averaged(config, answers.rows)
    say_columns(rows, SHOWN, digits=4, left=3)
    timed = [{name: value for name, value in row.items() if not name.endswith("_per_s")} for row in clocks.rows]
    summary: dict[str, Any] = {
        **stamp.values(),
        "checkpoint": str(folder),
        "uniform": [str(each) for each in folders[1:]],
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "num_layers": models[asked.plain].spec.num_layers,
        "close": config.close,
        "noisy": any(row["noisy"] for row in timed),
        "rows": rows,
        "equal": compared(asked, answers.rows),
        "clocks": timed,
        "failed": {**answers.failed, **clocks.failed},
    }
    summary["figures"] = draw("uniformity", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if summary["failed"] else 0


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
                for batch in asked.config.batches:
                    ways.append(({**values, "rule": SYNC, "batch": batch}, BatchRule.sync, policy))
    return [
        Trial(values, lambda v=values, r=rule, p=policy: [answered(asked, v, r, p)])  # type: ignore[misc]
        for values, rule, policy in ways
    ]


def clock_trials(asked: Asked, rows: Sequence[Row]) -> list[Trial]:
    """A batch size each: under ``sync`` every model at its shallowest threshold that is close enough; none where the
    plain model's full depth is not known."""
    if not any((row["model"], row["measure"]) == (asked.plain, FULL) for row in rows):
        return []
    found = []
    for batch in asked.config.batches:
        chosen = close_enough(asked, rows, batch)
        label = f"clock {batch} {hash_json([[m, e.value, t] for (m, e), t in chosen.items()])[:8]}"
        measure = lambda b=batch, c=chosen: timed_at(asked, c, b)  # noqa: E731
        found.append(Trial({"batch": batch}, measure, label))
    return found


def curve(asked: Asked, rows: Sequence[Row], way: tuple[str, str, str], batch: int | None) -> Curve | None:
    """Of a model, measure and rule; full depth is its first point. None where a decode of it failed."""
    model, measure, rule = way
    full = [row for row in rows if (row["model"], row["measure"]) == (model, FULL)]
    exits = [
        row
        for row in rows
        if (row["model"], row["measure"], row["rule"]) == way and (batch is None or row["batch"] == batch)
    ]
    wanted = len(asked.policies(model, next(each for each in asked.config.measures if each.value == measure)))
    return Curve.of(full + exits) if full and len(exits) == wanted else None


def compared(asked: Asked, rows: Sequence[Row]) -> list[Row]:
    """Each uniform model against the plain one where their ROUGE-L is equal."""
    config, found = asked.config, list[Row]()
    ways: list[tuple[str, int | None]] = [(OWN, None), *((SYNC, batch) for batch in config.batches)]
    for model in [name for name in asked.models if name != asked.plain]:
        for measure in config.measures:
            for rule, batch in ways:
                plain, other = (curve(asked, rows, (name, measure.value, rule), batch) for name in (asked.plain, model))
                if plain is None or other is None:
                    continue
                values = at_equal_quality(plain, other, config.close, config.seed, config.bootstrap)
                found.append({"model": model, "measure": measure.value, "rule": rule, "batch": batch, **values})
    return found


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
    """``rows.parquet``: scores and layers of every article; ``samples.parquet``: every round of the clock."""
    import pandas as pd

    pd.DataFrame(answers).to_parquet(run_dir / "rows.parquet", compression="zstd")
    pd.DataFrame(clocks).to_parquet(run_dir / "samples.parquet", compression="zstd")


main = program("uniformity", UniformityRunConfig, run)

if __name__ == "__main__":
    main()
