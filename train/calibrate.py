"""Stage 3: certify exit thresholds on the folder that was written, with the decoder of the tests (decode_batch)."""

import logging
import time
from pathlib import Path

import torch

from calm.calibration import Artifact
from calm.calibration.bars import Bars
from calm.calibration.certify import certify_folder, check_possible
from calm.config import Device, TrainConfig
from calm.decode_spec import DecodeSpec
from calm.parallel_decode import ParallelDecoder
from calm.tracking import Tracker
from calm.tracking_cards import folder_name
from calm.tracking_tables import track_calibration

log = logging.getLogger(__name__)


def run_calibration(
    model_folder: str | Path, config: TrainConfig, run_dir: Path, tracker: Tracker | None
) -> list[Artifact]:
    """Calibrate a model folder and store the artifacts in it. To be called by one process of a run only.

    The arithmetic is fp32 whatever training used: that is what certificates are claimed for. Rows are decoded by
    processes of their own. Interrupted, it goes on where it was when called again.

    Raises:
        ConfigError, DataError, CalibrationError.
    """
    begun = time.monotonic()
    calibration = config.calibration
    spec = DecodeSpec(
        folder=str(model_folder),
        device="cuda" if config.device is not Device.cpu and torch.cuda.is_available() else "cpu",
        decoder=calibration.decoder,
        batch_size=calibration.batch_size,
        backfill=calibration.backfill,
        record_confidences=True,
    )
    bars = Bars()
    with ParallelDecoder(spec, config.processes, bars.rows) as decode:
        check_possible(calibration, decode.model)
        done = certify_folder(
            model_folder, decode.model, decode, calibration, config.data, dtype=spec.dtype, progress=bars
        )
    if not done.any_below_one:
        log.warning("nothing below threshold 1 was certified: the model runs at full depth wherever that is asked for")
    if tracker is not None:
        seconds = time.monotonic() - begun
        tracker.event("calibration", rows=len(done.calibration), seconds=seconds, results=_results(done.artifacts))
        track_calibration(tracker, done.artifacts, folder_name(model_folder))
    return done.artifacts


def _results(artifacts: list[Artifact]) -> dict[str, dict[str, float | bool | list[float]]]:
    """Per measure and tolerance what was certified."""
    return {
        f"{artifact.name}-{certificate.tolerance:g}": {
            "threshold": list(certificate.threshold)
            if isinstance(certificate.threshold, tuple)
            else certificate.threshold,
            "layers_skipped": artifact.layers_skipped[len(certificate.certified) - 1],
            "mean_loss": artifact.mean_losses[len(certificate.certified) - 1],
            "picked": certificate.picked,
        }
        for artifact in artifacts
        for certificate in artifact.certificates
    }
