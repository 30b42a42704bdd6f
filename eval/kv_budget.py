"""Whether a budget of errors helps: a token at full depth when those of backfilled keys and values have added up.

    python -m eval.kv_budget checkpoint=results/debian_tiny/model

A table of expected errors by layers skipped and layer-to-layer cosine is made from exits on dev (calm/kv_budget.py,
after River-LLM, 2604.18396), and held against exits on test. Test articles are answered with the same certified exits
on several budgets, and beside them: without a budget, with true keys and values, with a step at full depth after every
so many exits whatever their error (does the forecast add anything?), and with higher thresholds and no budget (are
layers better spent there?). The certificate speaks of the exits without a budget alone. Layers are counted and nothing
is timed. Intervals are over articles. Writes summary.json, rows.parquet and the figure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import Backfill
from calm.device import choose_device
from calm.errors import CalmError, DataError
from calm.experiment_config import KvBudgetConfig
from calm.kv_budget import ErrorTable

from .backfill import certified
from .common import Stamp, asked_of, choose_model, finish, first_articles, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .kv_budget_rows import (
    BUDGET,
    EVERY,
    FULL,
    PROJECT,
    THRESHOLD,
    TRUE,
    Compared,
    Way,
    fit_row,
    table_from,
    table_rows,
)
from .trials import Found, Ledger, Trial

if TYPE_CHECKING:
    from calm.calibration import Artifact

UNIMPORTANT = ("checkpoint", "device", "batch_size")  # to a trial's numbers
SHOWN = ("way", "rouge_l", "rouge_l_minus_project", "to_full", "equal_rows", "layers", "deep")


def run(config: KvBudgetConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.kv_budget", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ModelIdentity
    from calm.calibration.grid import point_to_json
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load
    from calm.models.t5 import t5_only

    model = t5_only(load(folder, device), "eval.kv_budget")
    identity = ModelIdentity.of(model, folder, dtype="float32")
    artifact = certified(folder, identity, config.measure, config.tolerance)
    corpus, splits = first_articles(config.data, model, {"dev": config.calibrated, "test": config.n})
    dev, articles = splits["dev"], splits["test"]
    if len(articles) < 2:
        raise DataError(f"the test split of {corpus} has {len(articles)} articles; two at least are needed")
    threshold = artifact.threshold_for(config.tolerance)
    say(f"corpus: {corpus}, {len(articles)} articles of test, {len(dev)} of dev; {artifact.name} at {threshold}")
    told = {
        "model": identity.to_json(),
        "artifact": artifact.name,
        "threshold": point_to_json(threshold),
        "rows_hash": hash_rows(articles),
        "dev_rows_hash": hash_rows(dev),
        "code": code_version(),
    }
    full, plain, *others = plain_ways(config, artifact)
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    made = ledger.run([Trial({"kind": "table"}, lambda: table_rows(config, model, dev, plain))], "kv_budget", say)
    if made.failed:
        raise CalmError(next(iter(made.failed.values())))
    table = table_from(made.rows)
    ways = [full, plain, *budgeted_ways(config, plain, table, model.num_layers), *others]
    compared = Compared(config, model, articles, full, plain)
    todo = [Trial({"kind": "fit"}, lambda: [fit_row(config, model, articles, plain, table)])]
    todo += [
        Trial(
            {"kind": "quality", "way": way.name, "role": way.role, "value": way.value},
            lambda w=way: [compared.row(w)],  # type: ignore[misc]
            label=way.name,
        )
        for way in ways
    ]
    todo.append(Trial({"kind": "pair"}, lambda: compared.pairs(ways)))
    more = ledger.run(todo, "kv_budget", say)
    found = Found([*made.rows, *more.rows], more.failed)
    rows = keep_rows(found, run_dir)
    say_columns([row for row in rows if row["kind"] == "quality"], SHOWN, digits=4)
    summary: dict[str, Any] = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(articles),
        "dev_articles": len(dev),
        **told,
        "certified_for": {"tolerance": config.tolerance, "way": PROJECT},
        "num_layers": model.num_layers,
        "table": table.to_json(),
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("kv_budget", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def plain_ways(config: KvBudgetConfig, artifact: "Artifact") -> list[Way]:
    """Without a budget: full depth, the certified exits, the same over true keys and values, higher thresholds."""
    from calm.policies import Full

    from .shallow_ways import thresholds

    chosen = artifact.threshold_for(config.tolerance)
    exits = artifact.policy(chosen)
    above = thresholds(artifact, None, len(artifact.grid))
    higher = [each for each in above.values() if _value(each) > _value(chosen)]
    spread = sorted({round(i * (len(higher) - 1) / max(1, config.points - 1)) for i in range(config.points)})
    return [
        Way(FULL, FULL, Full()),
        Way(PROJECT, PROJECT, exits, _value(chosen)),
        Way(TRUE, TRUE, exits, _value(chosen), Backfill.true),
        *(
            Way(f"threshold {_value(point)}", THRESHOLD, artifact.policy(point), _value(point))
            for point in (higher[place] for place in spread if higher)
        ),
    ]


def _value(threshold: Any) -> float:
    """A threshold as one number: of one for each layer their mean."""
    return float(threshold) if isinstance(threshold, float | int) else sum(threshold) / len(threshold)


def budgeted_ways(config: KvBudgetConfig, plain: Way, table: ErrorTable, num_layers: int) -> Sequence[Way]:
    """The same exits on budgets, and with a step at full depth after so many of them."""
    from calm.policies import Budgeted, Confident

    exits, flat = plain.policy, ErrorTable.flat(num_layers)
    assert isinstance(exits, Confident)
    return [
        *(Way(f"budget {each:g}", BUDGET, Budgeted(exits, each, table), each) for each in config.budgets),
        *(Way(f"every {each}", EVERY, Budgeted(exits, float(each), flat), float(each)) for each in config.every),
    ]


main = program("kv_budget", KvBudgetConfig, run)

if __name__ == "__main__":
    main()
