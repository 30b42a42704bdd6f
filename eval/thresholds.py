"""Quality against layers skipped along the thresholds of each measure, schedule and head, with certified points.

    python -m eval.thresholds checkpoint=results/debian_tiny/model

Calibration and test articles are decoded in fp32 at every threshold of a grid fixed on dev, at full depth and at every
static depth. Calibration articles certify a point of each curve for each tolerance (risk consistency, CALM section 4;
each curve by itself at the whole error_prob), test articles say what it is worth. Then both are pooled and cut into
random halves, of which one certifies and the other is looked at. A certificate speaks of the mean of all that will
come, which a half only estimates, and the splits overlap: an illustration, no test. Layers are counted, nothing is
timed. Intervals are over articles. Writes summary.json, rows.parquet (a row for each trial, articles as lists) and the
figure.
"""

from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from calm.cli import program
from calm.config import Head, Measure, Schedule
from calm.device import choose_device
from calm.errors import CalmError, ConfigError, DataError
from calm.experiment_config import ThresholdsConfig

from .common import Stamp, asked_of, choose_model, corpus_settings, finish, first_articles, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .thresholds_decode import Curve, Decoders, Points, curves
from .thresholds_rows import Answers, Measured, rows_of
from .trials import Found, Ledger, Trial

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.records import Example

UNIMPORTANT = (  # to an article's answer at a point that the trial names
    "checkpoint", "data", "n", "measures", "schedules", "heads", "tolerances", "error_prob", "splits", "runner",
    "batch_size", "processes", "device", "bootstrap", "seed",
)  # fmt: skip
SHOWN = (
    "measure", "schedule", "head", "tolerance", "threshold", "layers_skipped", "rouge_l", "loss", "calibration_loss",
)  # fmt: skip


def run(config: ThresholdsConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.thresholds", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ModelIdentity, hash_rows
    from calm.calibration.identity import code_version
    from calm.models.folder import load
    from calm.models.settings import need_exits

    model = load(folder, "cpu")  # decoders open their own
    need_exits(model.settings, "eval.thresholds")
    corpus, splits = articles_of_splits(config, model)
    dev, articles = splits["dev"], [*splits["calibration"], *splits["test"]]
    measures = known_measures(config, model)
    told = {
        "model": ModelIdentity.of(model, folder, dtype="float32").to_json(),
        "dev_hash": hash_rows(dev),
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **told})
    with Decoders(str(folder), device, config) as decoders:
        points = Points(config, model, decoders, dev, articles)
        asked = curves(config, measures)
        grids = ledger.run([grid_trial(points, curve) for curve in asked], "grids", say)
        found = ledger.run(list(trials(points, grids, model.num_layers)), "thresholds", say)
    kept = keep_rows(found, run_dir)
    failed = {**grids.failed, **found.failed}
    rows = rows_of(measured(config, model.num_layers, len(splits["calibration"]), asked, kept, failed))
    say_columns([row for row in rows if row["kind"] == "certified"], SHOWN, digits=4, left=3)
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": {name: len(examples) for name, examples in splits.items()},
        **told,
        "num_layers": model.num_layers,
        "tolerances": list(config.tolerances),
        "error_prob": config.error_prob,
        "rows": rows,
        "failed": failed,
    }
    summary["figures"] = draw("thresholds", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if failed else 0


def articles_of_splits(config: ThresholdsConfig, model: "SpeakingModel") -> "tuple[str, dict[str, list[Example]]]":
    """Name of the corpus; its first articles of dev, calibration and test, one of each family in the last two.

    Raises:
        CalibrationError: they share a family or a text, or the model was trained on one.
        ConfigError, DataError: there is no corpus, or too few articles.
    """
    from calm.calibration import check_disjoint
    from calm.calibration.rows import check_families
    from calm.calibration.trained import training_rows

    limits = {"dev": config.dev_rows, "calibration": config.n, "test": config.n}
    corpus, splits = first_articles(config.data, model, limits)
    training = training_rows(model, corpus_settings(config.data, model.settings.data))
    check_disjoint({**splits, "train": training})
    check_families([*splits["calibration"], *splits["test"]])
    said = ", ".join(f"{len(rows)} of {name}" for name, rows in splits.items())
    say(f"corpus: {corpus}, {said}; {model.num_layers} decoder layers")
    if min(map(len, splits.values())) < 2:
        raise DataError(f"{corpus}: an interval needs at least two articles of each split, and there are {said}")
    return corpus, splits


def known_measures(config: ThresholdsConfig, model: "SpeakingModel") -> list[Measure]:
    """Those asked for, without ``classifier``, which is said, where the model has none.

    Raises:
        ConfigError: none is left.
    """
    if Measure.classifier not in config.measures or model.settings.has_classifier:
        return list(config.measures)
    say("classifier: this model has none; python -m train stage=classifier checkpoint=FOLDER trains it")
    left: list[Measure] = [measure for measure in config.measures if measure is not Measure.classifier]
    if not left:
        raise ConfigError("measures: this model has no classifier; give another, such as measures=[softmax]")
    return left


def grid_trial(points: Points, curve: Curve) -> Trial:
    return Trial({"kind": "grid", **curve.values, "point": None}, lambda: points.grid(curve))


def trials(points: Points, grids: Found, num_layers: int) -> list[Trial]:
    """Full depth, every static depth, and the thresholds below 1 of every curve whose grid could be made."""
    from calm.policies import Full, Static

    nobody = dict.fromkeys(("measure", "schedule", "head"))
    found = [Trial({"kind": "full", **nobody, "point": num_layers}, lambda: [points.answered(Full())])]
    for layer in range(1, num_layers):
        values = {"kind": "static", **nobody, "point": layer}
        found.append(Trial(values, lambda at=layer: [points.answered(Static(at))]))  # type: ignore[misc]
    for grid in grids.rows:
        curve = curve_of(grid)
        for index, threshold in enumerate(grid["thresholds"]):
            if index:  # the first is full depth
                values = {"kind": "curve", **curve.values, "point": index}
                found.append(Trial(values, lambda c=curve, t=threshold: points.at(c, t)))  # type: ignore[misc]
    return found


def curve_of(row: dict[str, object]) -> Curve:
    return Curve(Measure(row["measure"]), Schedule(row["schedule"]), Head(row["head"]))


def measured(
    config: ThresholdsConfig,
    num_layers: int,
    calibration: int,
    asked: Sequence[Curve],
    rows: Sequence[dict[str, object]],
    failed: dict[str, str],
) -> Measured:
    """What the trials brought; a curve ends before its first point that failed, for no sequence goes past it.

    Raises:
        CalmError: there is no full depth, or no point of any curve.
    """
    full = [row for row in rows if row["kind"] == "full"]
    found: dict[Curve, list[Answers]] = {}
    for curve in asked:
        mine = {row["point"]: row for row in rows if row["kind"] == "curve" and curve_of(row) == curve}
        unbroken = [mine[index] for index in takewhile(mine.__contains__, count(1))]
        if unbroken and full:
            found[curve] = [Answers.of(full[0]), *map(Answers.of, unbroken)]
    if not found:
        raise CalmError("; ".join(f"{name}: {why}" for name, why in failed.items()) or "no threshold was decoded")
    static = {int(str(row["point"])): Answers.of(row) for row in rows if row["kind"] == "static"}
    return Measured(config, num_layers, calibration, Answers.of(full[0]), static, found)


main = program("thresholds", ThresholdsConfig, run)

if __name__ == "__main__":
    main()
