"""How eval.gpu_check trains: the small shape from random weights, in processes of ``train`` as a user's runs are.

A short run tells how long a step takes, and so how many steps the time is enough for: the learning rate shall have
fallen to its end when the time is over.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calm.checkpoint import read_json, write_json
from calm.config import (
    ClassifierConfig,
    Device,
    ExitLoss,
    FinetuneConfig,
    Precision,
    Stage,
    TrackingConfig,
    TrackingMode,
    TrainConfig,
)
from calm.errors import TrainingError
from calm.tracking import read_metrics

from .common import plain
from .gpu_asked import Record
from .gpu_corpus import MODEL, Unpacked

if TYPE_CHECKING:
    from calm.models.t5 import EarlyExitT5

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 120.0  # of training, whatever the time
POINTS = 40  # of the loss by time, at most about


@dataclass(frozen=True)
class Training:
    """What is trained on what.

    Attributes:
        shape: of eval.shapes.
        work: for models and runs.
    """

    device: str
    shape: str
    corpus: Unpacked
    work: Path

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"

    @property
    def begun(self) -> Path:
        """The folder with random weights."""
        return self.work / "begun"

    @property
    def model(self) -> Path:
        """The finetuned folder."""
        return self.work / "model"

    @property
    def whole(self) -> Path:
        """The same with an exit classifier."""
        return self.work / "whole"

    @property
    def precision(self) -> Precision:
        """Of the products; weights and optimizer stay in fp32."""
        return Precision.fp32 if self.rehearsal else Precision.bf16

    def config(self, stage: Stage, checkpoint: Path, output: Path) -> TrainConfig:
        return TrainConfig(
            data=self.corpus.data, stage=stage, checkpoint=str(checkpoint), output=str(output),
            tokenised=str(self.corpus.tokens), device=Device(self.device), processes=1,
            precision=self.precision, tracking=TrackingConfig(TrackingMode.disabled),
        )  # fmt: skip

    def finetuning(self, steps: int) -> FinetuneConfig:
        """AdamW, the losses of results/debian_tiny; validated and saved once, at the end."""
        return FinetuneConfig(
            steps=steps, batch_size=16 if self.rehearsal else 256, lr=1e-3, beta2=0.98, dropout_rate=0.1,
            warmup_steps=min(200, steps // 4), loss=ExitLoss.last_plus_mean, rotate=1,
            log_every=max(2 if self.rehearsal else 10, steps // POINTS), eval_every=steps, save_every=steps, keep=1,
            eval_rows=4 if self.rehearsal else 200,
        )  # fmt: skip


def train(training: Training, seconds: float) -> Record:
    """Finetune within so many seconds. Raises TrainingError where a run fails or they are over."""
    import torch

    from .gpu_timings import operations, product_flops

    deadline, few = time.monotonic() + seconds, 6 if training.rehearsal else 50
    begun = begin(training)
    peak = product_flops(training.device, torch.float32 if training.rehearsal else torch.bfloat16)
    rows = tokens_of_a_row(training, begun)
    tried = _finetuned(training, few, training.work / "tried", deadline)
    aside = tried["wall_s"] - few * tried["step_s"]  # to start, to validate, to save
    rest = min(deadline - time.monotonic() - 1.5 * aside, 4.0 if training.rehearsal else LONGEST_S)
    steps = max(few, int(rest / tried["step_s"]))
    found = _finetuned(training, steps, training.model, deadline)
    batch = training.finetuning(steps).batch_size
    rates = {side: batch * tokens / found["step_s"] for side, tokens in rows.items()}
    source, target = operations(begun.hf)
    return {
        "shape": training.shape,
        "parameters": sum(parameter.numel() for parameter in begun.hf.parameters()),
        "vocabulary": begun.hf.config.vocab_size,
        "words_in_use": len(begun.tokenizer),
        "precision": training.precision.value,
        "batch_size": batch,
        "tokens_of_a_row": rows,
        "tried": {name: tried[name] for name in ("steps", "step_s", "wall_s")},
        **found,
        **{f"{side}_tokens_per_s": rate for side, rate in rates.items()},
        "product_flops": peak,
        "share_of_peak": (source * rates["source"] + target * rates["target"]) / peak,
    }


def begin(training: Training) -> "EarlyExitT5":
    """Random weights in a model folder: with the shape's vocabulary where that is larger than the tokenizer's, whose
    other words are multiplied too and never said.
    """
    import torch
    from transformers import AutoTokenizer

    from calm.models.build import t5_from_scratch
    from calm.models.folder import save
    from calm.models.settings import EarlyExitSettings
    from calm.models.t5 import EarlyExitT5

    from .shapes import PAPER_NAMES, shape_of, word_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    shape, data = shape_of(training.shape), training.corpus.data
    settings = EarlyExitSettings(
        exit_layers=list(range(1, shape.num_decoder_layers)), max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens, truncate=data.truncate.value,
        model=PAPER_NAMES.get(training.shape, training.shape),
    )  # fmt: skip
    torch.manual_seed(0)
    made = t5_from_scratch(shape, word_tokenizer(max(shape.vocab_size, len(tokenizer))), settings)
    model = EarlyExitT5(made.hf, tokenizer, settings)
    save(model, training.begun)
    return model


def tokens_of_a_row(training: Training, model: "EarlyExitT5") -> dict[str, float]:
    """Means over the train split, of which an epoch is every row: ``source`` and ``target``, without padding."""
    from calm.data import load_corpus, tokenised
    from calm.data.text import encode_source, encode_target

    tokenised.use(training.corpus.tokens, model.tokenizer)
    rows = load_corpus(training.corpus.data, splits=("train",)).splits["train"]
    limit = training.corpus.data.max_target_tokens
    return {
        "source": statistics.fmean(len(encode_source(model.tokenizer, row.source, model.settings)) for row in rows),
        "target": statistics.fmean(len(encode_target(model.tokenizer, row.target, limit)) for row in rows),
    }


def classify(training: Training, seconds: float) -> Record:
    """Fit the exit classifier on the finetuned folder. Raises TrainingError as ``train`` does."""
    config = training.config(Stage.classifier, training.model, training.whole)
    few = ClassifierConfig(steps=4, batch_size=8, tokens=200, eval_rows=8)
    config.classifier = few if training.rehearsal else ClassifierConfig(steps=300, lr=5e-2)
    run_dir = _run(training, config, time.monotonic() + seconds)
    report = read_json(run_dir / "classifier.json")
    return {name: report[name] for name in ("steps", "untrained_loss", "validation_loss", "train_tokens", "layers")}


def _finetuned(training: Training, steps: int, output: Path, deadline: float) -> Record:
    """From random weights: what a step took (median between two lines of the log) and how the loss fell."""
    config = training.config(Stage.finetune, training.begun, output)
    config.finetune = training.finetuning(steps)
    began = time.monotonic()
    records = read_metrics(_run(training, config, deadline))
    wall_s = time.monotonic() - began
    logged = [each for each in records if "train/loss" in each]
    start = next(each["time"] for each in records if each.get("stage") == "finetune")
    last = f"train/loss_layer_{max(int(key[-2:]) for key in logged[0] if key.startswith('train/loss_layer_')):02}"
    pairs = zip(logged, logged[1:], strict=False)
    return {
        "steps": steps,
        "seconds": logged[-1]["time"] - start,
        "wall_s": wall_s,
        "step_s": statistics.median((b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairs),
        "peak_memory_gib": max(each["peak_memory_gib"] for each in logged),
        "loss": [
            {"s": each["time"] - start, "step": each["step"], "loss": each["train/loss"], "last_layer": each[last]}
            for each in logged
        ],
        "rouge_l": next(each["eval/rougeL"] for each in reversed(records) if "eval/rougeL" in each),
    }


def _run(training: Training, config: TrainConfig, deadline: float) -> Path:
    """The folder of a run in a process of its own. Raises TrainingError where that fails, or the time is over."""
    run_dir = training.work / f"{Path(config.output or '').name}-run"
    run_dir.mkdir()
    write_json(run_dir / "settings.json", plain(config))
    command = [sys.executable, "-m", "train.settled", str(run_dir / "settings.json"), str(run_dir)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        code = subprocess.run(
            command, timeout=max(0.0, deadline - time.monotonic()), env={**os.environ, "PYTHONPATH": path}
        ).returncode
    except subprocess.TimeoutExpired:
        raise TrainingError(f"{run_dir.name} was ended, its share of the time was over") from None
    if code:
        raise TrainingError(f"{run_dir.name} ended with status {code}")
    return run_dir
