"""Certify exit thresholds of a trained model folder and store them beside its weights.

    python -m eval.calibrate checkpoint=runs/demo/model calibration.tolerances=[0.02,0.05]
    python -m eval.calibrate checkpoint=runs/demo/model from_log=requests.log calibration.consistency=textual

Prints how many rows there are and are needed before the expensive pass, and the ladder of thresholds after it. Exits
with 3 where nothing below 1 (full depth) passes for any measure.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import CalibrateConfig, DataConfig, Pretext, SplitConfig
from calm.device import choose_device

from .common import (
    Stamp,
    choose_dtype,
    choose_model,
    choose_runner,
    corpus_settings,
    decoder_maker,
    finish,
    open_decoder,
    plain,
    say,
)

if TYPE_CHECKING:
    from calm.calibration import Artifact, Certificate
    from calm.calibration.certify import Certification

NOTHING_PASSED = 3


def run(config: CalibrateConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.calibrate", config)
    folder = choose_model(config.checkpoint)
    device, dtype = choose_device(config.device), choose_dtype(config.precision)
    from calm.calibration.bars import Bars
    from calm.calibration.certify import certify_folder, check_possible
    from calm.decode_spec import DecodeSpec

    wanted = config.calibration
    spec = DecodeSpec(
        str(folder), device, dtype, wanted.decoder, wanted.batch_size, wanted.backfill, True, wanted.head,
        wanted.head_k, **choose_runner(wanted.decoder, wanted.runner, device, folder), weights=wanted.weights,
        cross_kv=wanted.cross_kv,
        make=decoder_maker(wanted.decoder),
    )  # fmt: skip
    bars = Bars()
    with open_decoder(spec, config.processes, bars.rows) as decode:
        if decode is None:
            return 0
        check_possible(wanted, decode.model, spec.arithmetic)
        data = corpus_settings(config.data, decode.model.settings.data)
        if config.from_log is not None:
            data = requests_of(config.from_log, data)
        named = ", ".join(measure.value for measure in wanted.measures)
        say(f"corpus: {data.name}; certifying {named} for {wanted.consistency.value} consistency")
        done = certify_folder(folder, decode.model, decode, wanted, data, dtype=spec.arithmetic, progress=bars)
    for artifact in done.artifacts:
        for certificate in artifact.certificates:
            say(ladder(artifact, certificate))
    if len(wanted.tolerances) > 1:
        say("Each tolerance holds by itself with its probability, not all of them at once.")
    if not done.any_below_one:
        say("Nothing below threshold 1 passed: full depth is all that is certified.")
    _track(config, run_dir, folder, done)
    finish({**stamp.values(), **_summary(folder, done)}, run_dir)
    return 0 if done.any_below_one else NOTHING_PASSED


def requests_of(log: str, trained_on: DataConfig) -> DataConfig:
    """Logged requests as a corpus: a fifth of the texts for dev, nearly all others to calibrate on."""
    return replace(
        trained_on,
        name="requests",
        path=log,
        pretext=Pretext.none,
        targets=None,
        split=SplitConfig(dev=0.2, calibration=0.79, test=0.005),
    )


def ladder(artifact: "Artifact", certificate: "Certificate") -> str:
    """The thresholds as they were tested, from full depth down, and where that stopped."""
    lines = [
        "",
        f"{artifact.measure.value}, {artifact.consistency.value} tolerance {certificate.tolerance:g}, "
        f"{artifact.schedule.value} schedule, n = {artifact.n} (at least {certificate.needed_n} are needed), "
        f"test level {artifact.test_level:.4g}" + (", picked on dev" if certificate.picked else ""),
        f"  {'threshold':>12}  {'mean loss':>9}  {'p':>9}  {'skipped':>8}  passed",
    ]
    stopped = False
    for index, p_value in enumerate(certificate.p_values):
        passed = index < len(certificate.certified)
        note = "yes" if passed else "no" if stopped else "no, stops here"
        stopped = stopped or not passed
        lines.append(
            f"  {_threshold(artifact.grid[index]):>12}  {artifact.mean_losses[index]:9.4f}  {p_value:9.2e}  "
            f"{artifact.layers_skipped[index]:7.1%}  {note}"
        )
    untested = len(artifact.grid) - len(certificate.p_values)
    if untested:
        lines.append(f"  {untested} more thresholds were not decoded")
    return "\n".join(lines)


def _threshold(value: float | tuple[float, ...]) -> str:
    return f"{min(value):.4f}..{max(value):.4f}" if isinstance(value, tuple) else f"{value:.6g}"


def _track(config: CalibrateConfig, run_dir: Path, folder: Path, done: "Certification") -> None:
    """What is certified into metrics.jsonl, and with the risk table and lineage into W&B where that is on."""
    from calm.tracking import Tracker
    from calm.tracking_cards import folder_name, model_card
    from calm.tracking_tables import certified_values, track_calibration

    name = folder_name(folder)
    tracker = Tracker(run_dir, config.tracking, "calibrate", plain(config), about=name)
    tracker.used(model_card(folder))
    for step, values in enumerate(certified_values(done.artifacts)):
        tracker.log(values, step)
    track_calibration(tracker, done.artifacts, name)
    tracker.finish()


def _summary(folder: Path, done: "Certification") -> dict[str, Any]:
    from calm.calibration import hash_rows

    results = [_result(artifact, each) for artifact in done.artifacts for each in artifact.certificates]
    return {
        "checkpoint": str(folder),
        "identity": done.identity.to_json(),
        "corpus": {"name": done.corpus.name, "content_hash": done.corpus.content_hash},
        "rows": {
            name: {"n": len(rows), "hash": hash_rows(rows)}
            for name, rows in (("calibration", done.calibration), ("dev", done.dev))
        },
        "calibration": results,
    }


def _result(artifact: "Artifact", certificate: "Certificate") -> dict[str, Any]:
    from calm.calibration.grid import point_to_json

    last = len(certificate.certified) - 1
    return {
        "measure": artifact.measure.value,
        "consistency": artifact.consistency.value,
        "schedule": artifact.schedule.value,
        "tolerance": certificate.tolerance,
        "error_prob": artifact.error_prob,
        "test_level": artifact.test_level,
        "n": artifact.n,
        "needed_n": certificate.needed_n,
        "threshold": point_to_json(certificate.threshold),
        "certified_below_one": certificate.certified_below_one,
        "p_value": certificate.p_values[last],
        "mean_loss": artifact.mean_losses[last],
        "layers_skipped": artifact.layers_skipped[last],
        "tested": len(certificate.p_values),
        "picked": certificate.picked,
    }


main = program("calibrate", CalibrateConfig, run)

if __name__ == "__main__":
    main()
