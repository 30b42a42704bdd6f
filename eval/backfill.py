"""What the keys and values of skipped layers are worth: each way of filling them, at a certified threshold.

    python -m eval.backfill checkpoint=results/debian_tiny/model

arXiv 2407.20272 (Algorithm 1, lines 9 to 11) projects them from the exit hidden, because hidden states saturate.
Answers of the test split with ``true`` ones (the skipped layers run after all: the ceiling), ``project``, ``copy``
(those of the exit layer) and ``mask`` (holes) are compared with the references and with full depth's own answers, whole
and position by position; then the errors of keys and values themselves by layers skipped (eval/backfill_states.py). The
threshold is certified for ``project`` alone. Intervals are over articles. Work is counted, and what filling takes of
the layers' own time is read from a cost table; ``true`` is also timed as one pass over several positions at batch 1
(eval/backfill_clock.py). Writes summary.json, rows.parquet and the
figure.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from calm.cli import program
from calm.config import Backfill, Consistency, Measure
from calm.device import choose_device
from calm.errors import CalibrationError, DataError
from calm.experiment_config import BackfillConfig

from .backfill_rows import FULL, Answers, answered, states
from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .trials import Ledger, Trial

if TYPE_CHECKING:
    from calm.calibration import Artifact, ModelIdentity

VARIANTS = (Backfill.true, Backfill.project, Backfill.copy, Backfill.mask)
UNIMPORTANT = ("checkpoint", "device", "batch_size")  # to the numbers
SHOWN = ("variant", "rouge_l", "to_full", "equal_rows", "layers", "fill_of_a_layer", "layers_with_fill")


def run(config: BackfillConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.backfill", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ModelIdentity
    from calm.calibration.grid import point_to_json
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load
    from calm.models.t5 import t5_only

    model = t5_only(load(folder, device), "eval.backfill")
    identity = ModelIdentity.of(model, folder, dtype="float32")
    artifact = certified(folder, identity, config.measure, config.tolerance)
    threshold = artifact.threshold_for(config.tolerance)
    corpus, articles = articles_of(config.data, model, config.n)
    if not articles:
        raise DataError(f"the test split of {corpus} is empty")
    say(f"corpus: {corpus}, {len(articles)} articles of the test split, one of each family")
    say(f"{artifact.name} at threshold {threshold}, certified for tolerance {config.tolerance:g} under project")
    told = {
        "model": identity.to_json(),
        "artifact": artifact.name,
        "threshold": point_to_json(threshold),
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    answers = Answers(model, articles, artifact.policy(threshold), config.batch_size)
    asked = {**asked_of(config, UNIMPORTANT), **told}
    todo = [*trials(config, answers), *clock_trials(config, folder, answers)]
    found = Ledger(run_dir, asked).run(todo, "backfill", say)
    rows = keep_rows(found, run_dir)
    say_columns([row for row in rows if row["kind"] == "quality"], SHOWN, digits=4)
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "certified_for": {"tolerance": config.tolerance, "backfill": Backfill.project.value},
        "num_layers": model.num_layers,
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("backfill", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def certified(folder: Path, identity: "ModelIdentity", measure: Measure | None, tolerance: float) -> "Artifact":
    """The artifact of the plain fp32 decode: of the measure asked for, else of the one that dev picked.

    Raises:
        CalibrationError: there is none, or nothing below full depth is certified, so that nothing is ever skipped.
    """
    from calm.calibration import load_artifacts
    from calm.calibration.artifact import choose_artifact

    fitting = [each for each in load_artifacts(folder) if not each.identity.differences(identity)]
    artifact = choose_artifact(fitting, Consistency.risk, measure, tolerance)
    if not artifact.certificate(tolerance).certified_below_one:
        raise CalibrationError(
            f"{artifact.name}: only full depth is certified for tolerance {tolerance:g}, so nothing is skipped; "
            "give measure= or another tolerance="
        )
    return artifact


def trials(config: BackfillConfig, answers: Answers) -> list[Trial]:
    """One for each way of filling and full depth, and one for the errors of keys and values."""
    names = [FULL, *(variant.value for variant in VARIANTS)]
    found = [
        Trial({"trial": "answers", "variant": name}, lambda v=name: answered(config, answers, v))  # type: ignore[misc]
        for name in names
    ]
    return [*found, Trial({"trial": "states", "variant": "all"}, lambda: states(config, answers))]


def clock_trials(config: BackfillConfig, folder: Path, answers: Answers) -> list[Trial]:
    """One for each batch size, and one for passes over several positions."""
    from .backfill_clock import clocks, passes

    found = [
        Trial(
            {"trial": "clock", "variant": str(batch)},
            partial(clocks, config, folder, answers.model, answers.articles, batch),
        )
        for batch in config.clock_batches
    ]
    if config.passes:
        todo = partial(passes, config, folder, answers.model, answers.articles, config.passes)
        found.append(Trial({"trial": "passes", "variant": "1"}, todo))
    return found


main = program("backfill", BackfillConfig, run)

if __name__ == "__main__":
    main()
