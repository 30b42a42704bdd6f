"""What every stage of a run is handed: settings, folder, processes, tracker, signals."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, broadcast_object_list

from calm.config import Device, Precision, TrainConfig
from calm.errors import FP16_REFUSED, CalmError, ConfigError, TrainingError
from calm.tracking import Tracker

from .signals import Signals

T = TypeVar("T")


@dataclass
class Context:
    """What every stage of a run shares in one process."""

    config: TrainConfig
    run_dir: Path
    accelerator: Accelerator
    signals: Signals
    tracker: Tracker | None = None  # in the first process only

    @property
    def main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def say(self, text: str) -> None:
        if self.main:
            print(text, file=sys.stderr, flush=True)

    def track(self, values: dict[str, float | int | str | None], step: int) -> None:
        """Metrics of a step. All processes call it, and all end when they cannot be written."""
        tracker = self.tracker
        self.on_main(lambda: tracker.log(values, step) if tracker else None)

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Something that happened; like ``track``."""
        tracker = self.tracker
        self.on_main(lambda: tracker.event(name, step, **details) if tracker else None)

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` in the first process while the others wait; its failure ends all of them, told once."""
        result: T | None = None
        failure: Exception | None = None
        if self.main:
            try:
                result = action()
            except Exception as error:
                failure = error
        if self.world > 1:
            box = [failure is not None]
            broadcast_object_list(box)
            if box[0] and failure is None:
                raise SystemExit(1)
        if failure is not None:
            raise failure
        return result


def resolve_precision(asked: Precision, device: torch.device) -> Precision:
    """``auto``: bf16 where the processor multiplies it natively, else fp32.

    Raises ConfigError for fp16, with the reason.
    """
    if asked is Precision.fp16:
        raise ConfigError(f"precision={FP16_REFUSED}")
    if asked is not Precision.auto:
        return asked
    if device.type == "cuda":
        return Precision.bf16 if torch.cuda.is_bf16_supported() else Precision.fp32
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return Precision.bf16 if native else Precision.fp32


def build_accelerator(config: TrainConfig) -> Accelerator:
    """Join the other processes, if any. Raises ConfigError when device=cuda finds none."""
    if config.device is Device.cuda and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device; use device=auto or device=cpu")
    cpu = config.device is Device.cpu or not torch.cuda.is_available()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    precision = resolve_precision(config.precision, torch.device("cpu" if cpu else "cuda"))
    return Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if precision is Precision.bf16 else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(hours=12)),  # the others wait while the first certifies
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LOST_MATE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def explained(error: BaseException, config: TrainConfig) -> CalmError | None:
    """The advice for an error of torch that users meet; None for any other."""
    text = str(error)
    if isinstance(error, MemoryError) or any(part in text for part in OUT_OF_MEMORY):
        batch, accumulation = config.finetune.batch_size, config.finetune.accumulation
        return TrainingError(
            f"out of memory with finetune.batch_size={batch} in {accumulation} micro-batch(es): try "
            f"finetune.accumulation={accumulation * 2} (same result, half the memory), finetune.gradient_checkpointing"
            "=true or a smaller finetune.batch_size; checkpoints written so far are kept: go on with resume="
        )
    if any(part in text for part in LOST_MATE):
        return TrainingError("another process of this run ended; what it said is in logs/ of the run folder")
    return None
