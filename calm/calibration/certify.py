"""From a model folder to certificates beside its weights: corpus, identity and storing around ``calibrate``.

The folder is opened as it was written, so what is certified is what will be served, rounding of stored weights
included. The decoder is handed in.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from ..config import CalibrationConfig, DataConfig, DecoderName, Head, Measure
from ..data import Corpus, load_corpus
from ..errors import ConfigError
from ..models.folder import add_sidecar
from ..models.settings import need_exits
from ..models.speaking import SpeakingModel
from ..records import Example
from .artifact import Artifact
from .calibrate import calibrate
from .identity import ModelIdentity, independent_of_batch
from .pvalues import needed_n
from .risk_table import Decode, Progress
from .trained import training_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Certification:
    """What one calibration made, and of what."""

    artifacts: list[Artifact]
    identity: ModelIdentity
    corpus: Corpus
    calibration: list[Example]
    dev: list[Example]

    @property
    def any_below_one(self) -> bool:
        """False where every measure stays at full depth at every tolerance."""
        return any(c.certified_below_one for artifact in self.artifacts for c in artifact.certificates)


def work_folder(folder: str | Path) -> Path:
    """Where a folder's risk tables and cached traces lie: beside it, so that an interrupted calibration goes on."""
    folder = Path(folder).absolute()
    return folder.with_name(f"{folder.name}-calibration")


def check_possible(config: CalibrationConfig, model: SpeakingModel, dtype: str = "float32") -> None:
    """Raise ConfigError for what cannot be calibrated here, before anything expensive is done.

    Args:
        dtype: of the decoder's arithmetic (calm.calibration.identity). Where an answer can depend on the size of its
            batch, its risk would have to be decoded at every size that is served.
    """
    need_exits(model.settings, "calibration")
    if not independent_of_batch(dtype):
        raise ConfigError(
            f"in {dtype} an answer depends on the size of its batch, so its risk at one size certifies nothing; use "
            "precision=fp32, or the native runner, under which it does not: calibration.decoder=engine "
            "calibration.runner=native"
        )
    if config.head is not Head.full and config.decoder is not DecoderName.engine:
        raise ConfigError(
            f"calibration.head={config.head.value} needs the engine: python -m eval.calibrate checkpoint=<folder> "
            f"calibration.decoder=engine calibration.head={config.head.value}"
        )
    if Measure.classifier in config.measures and not model.settings.has_classifier:
        others = ",".join(m.value for m in config.measures if m is not Measure.classifier) or Measure.softmax.value
        raise ConfigError(
            "measure 'classifier' needs a trained exit classifier and this model has none: run python -m train "
            f"stage=classifier checkpoint=<folder>, or calibrate the others with calibration.measures=[{others}]"
        )


def needed_text(config: CalibrationConfig, n: int) -> str:
    """How many rows there are and how many are needed, in one line."""
    level = config.error_prob / len(config.measures)
    asked = "; ".join(
        f"at tolerance {t:g} {needed_n(t, level)} without any loss, {needed_n(t, level, t / 2)} at mean loss {t / 2:g}"
        for t in config.tolerances
    )
    return f"n = {n} calibration rows; needed: {asked} (test level {level:.4g})"


def certify_folder(
    folder: str | Path,
    model: SpeakingModel,
    decode: Decode,
    config: CalibrationConfig,
    data: DataConfig,
    *,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Certification:
    """Calibrate ``model``, opened from ``folder``, and put the artifacts into ``<folder>/calibration``.

    Args:
        decode: over that model, recording confidences; it may spread rows over processes.
        dtype: of the decoder's arithmetic.

    Raises:
        ConfigError, DataError, CalibrationError: among others where rows are some that the model was trained on.
    """
    check_possible(config, model, dtype)
    tokenizer = model.tokenizer if data.max_article_tokens is not None else None
    corpus = load_corpus(data, splits=("dev", "calibration"), tokenizer=tokenizer)
    calibration = corpus.splits["calibration"][: config.n]
    log.info("%s", needed_text(config, len(calibration)))
    identity = ModelIdentity.of(
        model,
        folder,
        dtype=dtype,
        backfill=config.backfill,
        head=config.head,
        head_k=config.head_k,
        decoder=config.decoder,
    )
    work = work_folder(folder)
    artifacts = calibrate(
        decode, corpus.splits["dev"], corpus.splits["calibration"], config, identity, work, progress, cache_dir=work,
        others={"train": training_rows(model, data)}, device=next(model.parameters()).device.type,
    )  # fmt: skip
    for artifact in artifacts:
        add_sidecar(folder, f"calibration/{artifact.name}.json", artifact.dumps())
    return Certification(artifacts, identity, corpus, calibration, corpus.splits["dev"][: config.dev_rows])
