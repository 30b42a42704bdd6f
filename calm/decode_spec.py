"""What the decoders that spread rows over processes share: how to decode, how rows are cut, how errors travel.

Rows are cut into batches in one way whatever the number of processes, so the answers do not depend on it.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .calibration.identity import arithmetic
from .config import Backfill, BatchRule, DecoderName, Head, RunnerName, Weights
from .decode import OneDecoder
from .decode_batch import BatchDecoder
from .errors import CalmError, ConfigError
from .models.folder import load
from .models.speaking import SpeakingModel
from .policies import Policy
from .records import DecodeTrace, Example

Decode = Callable[[Sequence[Example], Policy], list[DecodeTrace]]
OnRows = Callable[[int], None]  # told how many rows were decoded since the last call


@dataclass(frozen=True)
class DecodeSpec:
    """What a process needs to decode: a model folder and how. ``dtype`` is float32 or bfloat16.

    ``make`` makes the decoder of ``decoder=engine``, which calm does not know; ``head``, ``head_k``, ``rule``,
    ``quantile``, ``runner`` (eager, native or graph), ``weights`` and ``cross_kv`` are the engine's; ``kernels`` names
    what the native runner's products are made of.
    """

    folder: str
    device: str = "cpu"
    dtype: str = "float32"
    decoder: DecoderName = DecoderName.batch
    batch_size: int = 64
    backfill: Backfill = Backfill.project
    record_confidences: bool = False
    head: Head = Head.full
    head_k: int = 32
    rule: BatchRule = BatchRule.own
    quantile: float = 0.5
    runner: RunnerName = RunnerName.eager
    weights: Weights = Weights.model
    cross_kv: Weights = Weights.model
    kernels: str = ""
    make: "Callable[[SpeakingModel, DecodeSpec], Decode] | None" = None

    def __post_init__(self) -> None:
        if self.decoder is DecoderName.engine and self.make is None:
            raise ConfigError(
                "decoder=engine is for programs of eval, such as eval.calibrate and eval.table1; choose batch or one"
            )
        if self.decoder is DecoderName.engine:
            return
        if (self.head, self.rule) != (Head.full, BatchRule.own):
            raise ConfigError(
                f"head={self.head.value} with rule={self.rule.value} needs decoder=engine; "
                f"decoder={self.decoder.value} has the full head and decodes each row as it is alone"
            )
        for name in ("weights", "cross_kv"):
            if getattr(self, name) is not Weights.model:
                raise ConfigError(f"{name}=int8 needs decoder=engine")

    @property
    def arithmetic(self) -> str:
        """Of the decode, as certificates name it (calm.calibration.identity)."""
        runner = self.runner if self.decoder is DecoderName.engine else RunnerName.eager
        return arithmetic(self.dtype, runner, self.weights, self.cross_kv, self.head, kernels=self.kernels)

    @property
    def rows_per_task(self) -> int:
        """Rows that a process decodes at a time: one batch, or several, so that an engine's rows come and go."""
        return self.batch_size * (8 if self.decoder is DecoderName.engine else 1)

    def load(self) -> SpeakingModel:
        return load(self.folder, self.device, getattr(torch, self.dtype))

    def over(self, model: SpeakingModel) -> Decode:
        """The decoder itself, in this process."""
        if self.decoder is DecoderName.engine:
            assert self.make is not None
            return self.make(model, self)
        if self.decoder is DecoderName.one:
            return OneDecoder(model, backfill=self.backfill, record_confidences=self.record_confidences)
        return BatchDecoder(
            model, batch_size=self.batch_size, backfill=self.backfill, record_confidences=self.record_confidences
        )


def cut(examples: Sequence[Example], batch_size: int) -> list[list[int]]:
    """Every row once, in batches of rows of like length, the longest first: so no process is left with them alone."""
    order = sorted(range(len(examples)), key=lambda i: (-len(examples[i].source), i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class SpreadDecoder:
    """What both forms share: the model of this process and the putting together of answers."""

    def __init__(self, spec: DecodeSpec, on_rows: OnRows | None) -> None:
        self.spec = spec
        self.model = spec.load()
        self.on_rows = on_rows
        self._decode = spec.over(self.model)

    def _tell(self, rows: int) -> None:
        if self.on_rows is not None:
            self.on_rows(rows)

    def _here(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        """Decode one batch in this process."""
        try:
            return self._decode(examples, policy)
        except torch.OutOfMemoryError:
            raise out_of_memory(self.spec) from None


@dataclass(frozen=True)
class Failure:
    """An error on its way from another process: its kind if it is ours, its line, and where it happened."""

    kind: type[CalmError]
    line: str
    where: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        line = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, CalmError):
            return cls(type(error), line, traceback.format_exc())
        return cls(CalmError, f"a decoding process failed: {type(error).__name__}: {line}", traceback.format_exc())

    def error(self) -> CalmError:
        error = self.kind(self.line)
        error.add_note(self.where)
        return error


def out_of_memory(spec: DecodeSpec) -> CalmError:
    return CalmError(f"out of memory on {spec.device} with batch_size={spec.batch_size}; try half of it")
