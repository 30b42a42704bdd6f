"""A model that has learned: the part of eval.gpu_check that trains one on real text, certifies it and shows its worth.

The small shape starts from random weights on the corpus that was brought along (eval.gpu_corpus) and goes the way of a
user's model: ``train`` (from complete settings: train.settled), then eval.calibrate, eval.table1, eval.throughput and
eval.latency. Each stage gets a share of the seconds that are left and is ended after them; what the others have found
stays, in the part's record and in ``learned/`` of its folder.
"""

import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from calm.checkpoint import finite, read_json, write_json
from calm.config import (
    CalibrateConfig,
    CalibrationConfig,
    DecoderName,
    Device,
    Measure,
    Precision,
    RunnerName,
    Table1Config,
    TrackingConfig,
    TrackingMode,
)
from calm.engine_config import ServingConfig
from calm.errors import CalmError

from .common import say
from .gpu_asked import MEASURES, RULES, Asked, Record
from .gpu_corpus import unpack
from .gpu_finetune import Training, classify, train

WORK = Path("runs/gpu_check")  # models and runs; emptied when the part begins
LATER_S = 0.1
ASIDE_S = 20.0  # to start this process, and for the record itself
SHOWN = ("name", "tokens_per_s", "ttft", "tpot", "inner_token_latency", "layers_skipped", "rouge_l")


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes:
        rows, dev_rows: of the calibration and of the dev split that certify.
        articles: of Table 1.
        batches, few, many, repeats, answered: of Figures 1 and 2, as ServingConfig has them.
    """

    rows: int = 800
    dev_rows: int = 300
    grid_size: int = 8
    tolerances: tuple[float, ...] = (0.05, 0.1)
    articles: int = 1000
    batches: tuple[int, ...] = (1, 8, 32)
    few: int = 4
    many: int = 20
    repeats: int = 5
    answered: int = 64


REHEARSED = Sizes(
    rows=40, dev_rows=20, grid_size=2, tolerances=(0.4,), articles=12, batches=(1, 2), few=2, many=6, repeats=2,
    answered=4,
)  # fmt: skip


@dataclass
class Stages:
    """What happens in turn, and what it found.

    Attributes:
        folder: of ``summary.json``, which is written after every stage.
        deadline: by time.monotonic.
        keep: is told of all that was found, after every stage.
    """

    folder: Path
    deadline: float
    keep: Callable[[Record], None]
    found: Record = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, share: float, act: Callable[[float], Record]) -> bool:
        """Hand ``act`` its share of the seconds left, keep what it returns; False where it failed or was ended."""
        began = time.monotonic()
        seconds = share * (self.deadline - began)
        try:
            if seconds <= 0:
                raise CalmError("the time was over before it could begin")
            say(f"{name}: has {seconds:.0f} s")
            with at_most(seconds):
                told = act(seconds)
        except (Exception, Over) as error:
            traceback.print_exc()
            told = {"why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            self.failed.append(f"{name}: {told['why']}")
        self.found[name] = {**told, "wall_s": round(time.monotonic() - began, 3)}
        write_json(self.folder / "summary.json", finite(self.found))
        self.keep(self.found)
        return "why" not in told


class Over(BaseException):
    """A stage's time is over. No Exception: an engine would take that for a row's own and go on."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Over in the main thread after so many seconds, or a little later: not in the middle of a capture."""

    def over(*_: object) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            signal.setitimer(signal.ITIMER_REAL, LATER_S)
            return
        raise Over(f"it was ended after {seconds:.0f} s, its share of the time")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def learned(asked: Asked) -> Record:
    """Training, exit classifier, certificates, Table 1, Figures 1 and 2. Raises DataError without the corpus."""
    deadline = time.monotonic() + asked.seconds - ASIDE_S
    sizes = REHEARSED if asked.rehearsal else Sizes()
    folder, work = asked.out / "learned", _empty(WORK / "learned")
    training = Training(asked.device, asked.shapes[0], unpack(asked.carried, work / "cache"), work)
    stages = Stages(_empty(folder), deadline, asked.keep)
    if stages.run("training", 0.4, lambda seconds: train(training, seconds)):
        speaks = stages.run("classifier", 0.3, lambda seconds: classify(training, seconds))
        after = Folder(
            asked.device, str(training.whole if speaks else training.model), sizes, folder, speaks, sizes.tolerances[0]
        )
        stages.run("calibration", 0.5, lambda _: after.certify())
        stages.run("table1", 0.4, lambda _: after.tabulate())
        stages.run("figures", 1.0, lambda _: after.draw())
    if not stages.failed:
        return stages.found
    return {**stages.found, "status": "failed", "why": "; ".join(stages.failed)}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@dataclass
class Folder:
    """A trained folder on its way through the programs of eval, by the runner of ``device``'s own step.

    Attributes:
        classifier: whether it has one.
        tolerance: of table and figures; once certified, the smallest for which something below full depth is.
    """

    device: str
    checkpoint: str
    sizes: Sizes
    out: Path
    classifier: bool
    tolerance: float

    @property
    def measures(self) -> list[Measure]:
        return [each for each in MEASURES if self.classifier or each is not Measure.classifier]

    def certify(self) -> Record:
        """As the engine decodes in fp32, for which a certificate holds at every batch size."""
        from . import calibrate

        sizes, where = self.sizes, self._run_dir("calibration")
        calibration = CalibrationConfig(
            measures=self.measures, tolerances=list(sizes.tolerances), n=sizes.rows, grid_size=sizes.grid_size,
            dev_rows=sizes.dev_rows, decoder=DecoderName.engine, runner=RunnerName.graph,
        )  # fmt: skip
        config = CalibrateConfig(
            checkpoint=self.checkpoint, calibration=calibration, device=Device(self.device), precision=Precision.fp32,
            processes=1, tracking=TrackingConfig(TrackingMode.disabled),
        )  # fmt: skip
        status = calibrate.run(config, where)
        certified: list[Record] = read_json(where / "summary.json")["calibration"]
        passed = [each["tolerance"] for each in certified if each["certified_below_one"]]
        self.tolerance = min(passed, default=self.tolerance)
        return {"status": status, "certificates": certified}

    def tabulate(self) -> Record:
        """Table 1 through the engine, in the arithmetic of the certificates."""
        from . import table1

        where = self._run_dir("table1")
        config = Table1Config(
            checkpoint=self.checkpoint, n=self.sizes.articles, measures=self.measures, tolerance=self.tolerance,
            decoder=DecoderName.engine, runner=RunnerName.graph, device=Device(self.device), precision=Precision.fp32,
            processes=1, tracking=TrackingConfig(TrackingMode.disabled),
        )  # fmt: skip
        table1.run(config, where)
        summary = read_json(where / "summary.json")
        return {name: summary[name] for name in ("corpus", "metric", "notes", "table1")}

    def draw(self) -> Record:
        """Figures 1 and 2 in bf16; the second of the first one's record."""
        from .serving_figures import LATENCY, THROUGHPUT
        from .serving_run import run_serving

        sizes, first, second = self.sizes, self._run_dir("throughput"), self._run_dir("latency")
        config = ServingConfig(
            checkpoint=self.checkpoint, n=sizes.answered, tolerance=self.tolerance, batches=list(sizes.batches),
            measures=self.measures, rules=RULES, dtype="bf16", runner=RunnerName.graph, device=Device(self.device),
            few=sizes.few, many=sizes.many, repeats=sizes.repeats, attempts=1, allow_noisy=True,
        )  # fmt: skip
        status = run_serving(config, first, THROUGHPUT)
        run_serving(ServingConfig(summary=str(first / "summary.json")), second, LATENCY)
        summary, drawn = read_json(first / "summary.json"), read_json(second / "summary.json")
        cells = [
            {"batch": cell["batch"], **{name: entry.get(name) for name in SHOWN}}
            for cell in summary["cells"]
            for entry in cell["entries"]
        ]
        told: dict[str, Any] = {name: summary[name] for name in ("model", "notes", "missing", "ratios")}
        return {"status": status, **told, "cells": cells, "figures": [*summary["figures"], *drawn["figures"]]}

    def _run_dir(self, name: str) -> Path:
        where = self.out / name
        where.mkdir()
        return where
