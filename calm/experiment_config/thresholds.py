"""Settings of eval.thresholds."""

from dataclasses import dataclass, field

from ..config import (
    INF,
    DataConfig,
    DecoderName,
    Device,
    Head,
    Measure,
    RunnerName,
    Schedule,
    check_once_each,
    check_range,
)
from ..errors import ConfigError


@dataclass
class ThresholdsConfig:
    """python -m eval.thresholds."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 1_000  # articles of the calibration split, and as many of the test split; None: all of them
    dev_rows: int = 300  # whose confidences the grids are made of
    grid_size: int = 20  # thresholds below 1.0
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state, Measure.classifier])
    schedules: list[Schedule] = field(default_factory=lambda: [Schedule.constant, Schedule.decaying])  # first: shown
    heads: list[Head] = field(default_factory=lambda: [Head.full, Head.candidates, Head.screened])
    head_k: int = 32  # words that the other heads look at exactly
    tau: float = 4.0
    agreement_k: int = 3
    tolerances: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1])  # of risk consistency
    error_prob: float = 0.05
    splits: int = 50  # of all articles, into halves
    decoder: DecoderName = DecoderName.engine
    runner: RunnerName = RunnerName.auto  # of decoder=engine
    batch_size: int = 64
    processes: int | None = None  # None: one per core on a CPU, one otherwise
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("measures", "schedules", "heads", "tolerances"):
            check_once_each(name, getattr(self, name))
        if Schedule.auto in self.schedules:
            raise ConfigError("schedules: auto leaves the choice to dev; name those to compare, such as constant")
        if Head.full not in self.heads:
            raise ConfigError("heads: full is what the others are compared with; add it")
        if self.decoder is not DecoderName.engine and len(self.heads) > 1:
            raise ConfigError(f"heads beside the full one need decoder=engine; give heads=[{Head.full.value}]")
        for value in self.tolerances:
            check_range("tolerances", value, 0, 1, open_low=True, open_high=True)
        check_range("error_prob", self.error_prob, 0, 1, open_low=True, open_high=True)
        check_range("tau", self.tau, 0, INF, open_high=True)
        check_range("head_k", self.head_k, 2, INF)
        for name in ("dev_rows", "grid_size", "agreement_k", "splits", "batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        for name in ("n", "processes"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
