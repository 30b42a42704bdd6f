"""What the keys and values of skipped layers are worth: each way of filling them, at a certified threshold.

    python -m eval.backfill checkpoint=results/debian_tiny/model

arXiv 2407.20272 (Algorithm 1, lines 9 to 11) projects them from the exit hidden, because hidden states saturate.
Answers of the test split with ``true`` ones (the skipped layers run after all: the ceiling), ``project``, ``copy``
(those of the exit layer) and ``mask`` (holes) are compared with the references and with full depth's own answers, whole
and position by position; then the errors of keys and values themselves by layers skipped (eval/backfill_states.py). The
threshold is certified for ``project`` alone. Intervals are over articles. Nothing is timed: work is counted. Writes
summary.json, rows.parquet and the figure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import Backfill, Consistency
from calm.errors import CalibrationError, CalmError, DataError
from calm.experiment_config import BackfillConfig

from .backfill_rows import FULL, Answers, answered, states
from .common import Stamp, articles_of, asked_of, can_draw, choose_device, choose_model, finish, say
from .tables import aligned
from .trials import Ledger, Row, Trial

if TYPE_CHECKING:
    from calm.calibration import Artifact, ModelIdentity

VARIANTS = (Backfill.true, Backfill.project, Backfill.copy, Backfill.mask)
UNIMPORTANT = ("checkpoint", "device", "batch_size")  # to the numbers
SHOWN = ("variant", "rouge_l", "to_full", "equal_rows", "layers", "fill_of_a_layer", "layers_with_fill")
UNFINISHED = 5  # exit status: a trial failed


def run(config: BackfillConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.backfill", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ModelIdentity
    from calm.calibration.grid import point_to_json
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load

    model = load(folder, device)
    identity = ModelIdentity.of(model, folder, dtype="float32")
    artifact = certified(folder, identity, config)
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
    found = Ledger(run_dir, asked).run(trials(config, answers), "backfill", say)
    if not found.rows:
        raise CalmError("; ".join(f"{name}: {why}" for name, why in found.failed.items()))
    write_rows(run_dir / "rows.parquet", found.rows)
    figures = draw(found.rows, run_dir)
    shown = [row for row in found.rows if row["kind"] == "quality"]
    say("\n".join(aligned([SHOWN, *(tuple(_shown(row[name]) for name in SHOWN) for row in shown)], left=1)))
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "certified_for": {"tolerance": config.tolerance, "backfill": Backfill.project.value},
        "num_layers": model.num_layers,
        "rows": found.rows,
        "failed": found.failed,
        "figures": figures,
    }
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def certified(folder: Path, identity: "ModelIdentity", config: BackfillConfig) -> "Artifact":
    """The artifact of the plain fp32 decode: of the measure asked for, else of the one that dev picked.

    Raises:
        CalibrationError: there is none, or nothing below full depth is certified, so that nothing is ever skipped.
    """
    from calm.calibration import load_artifacts
    from calm.calibration.artifact import choose_artifact

    fitting = [each for each in load_artifacts(folder) if not each.identity.differences(identity)]
    artifact = choose_artifact(fitting, Consistency.risk, config.measure, config.tolerance)
    if not artifact.certificate(config.tolerance).certified_below_one:
        raise CalibrationError(
            f"{artifact.name}: only full depth is certified for tolerance {config.tolerance:g}, so nothing is skipped; "
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


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    import pandas as pd

    pd.DataFrame(list(rows)).to_parquet(path, compression="zstd")


def draw(rows: Sequence[Row], run_dir: Path) -> list[str]:
    """The figure as PNG and PDF; nothing where matplotlib is not installed."""
    if not can_draw():
        return []
    import pandas as pd

    from calm.report_plots import plot_backfill

    axes = plot_backfill(pd.DataFrame(list(rows)))
    names = [f"backfill.{kind}" for kind in ("png", "pdf")]
    for name in names:
        axes[0].figure.savefig(run_dir / name, dpi=150, metadata={"CreationDate": None} if name[-1] == "f" else None)
    return names


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


main = program("backfill", BackfillConfig, run)

if __name__ == "__main__":
    main()
