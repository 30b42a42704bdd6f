"""Settings of the experiments that eval.report brings together; values in ``conf/<name>.yaml``."""

from dataclasses import dataclass, field

from .config import INF, DataConfig, Device, Measure, check_once_each, check_range
from .engine_config import SERVED_DTYPES, SERVED_SHAPES, check_choice


@dataclass
class SlowestRowConfig:
    """python -m eval.slowest_row."""

    records: str | None = None  # folder of an eval.table1 run; default: the newest under runs/
    rows: list[str] = field(default_factory=list)  # of its table; default: those whose threshold is certified
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])
    quantiles: list[float] = field(default_factory=lambda: [0.5, 0.9])
    hard_shares: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    mixed_batches: list[int] = field(default_factory=lambda: [8, 32])  # at which mixtures are drawn
    draws: int = 300  # batches of each size
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "quantiles", "hard_shares", "mixed_batches"):
            check_once_each(name, getattr(self, name))
        for name in ("batches", "mixed_batches"):
            for rows in getattr(self, name):
                check_range(name, rows, 1, INF)
        for share in self.quantiles:
            check_range("quantiles", share, 0, 1, open_low=True)
        for share in self.hard_shares:
            check_range("hard_shares", share, 0, 1)
        check_range("draws", self.draws, 2, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)


@dataclass
class SuitabilityConfig:
    """python -m eval.suitability."""

    checkpoint: str | None = None  # a model folder, or a plain T5 folder; default: the newest model folder under runs/
    data: DataConfig | None = None  # default: as the model was trained; a plain T5 folder needs one
    n: int = 200  # articles of the test split, as far as it has them
    batches: list[int] = field(default_factory=lambda: [1, 8])  # whose steps are counted: small ones go by bytes
    batch_size: int = 25  # articles that are decoded at once, and kept at once in the ledger
    bootstrap: int = 1_000
    device: Device = Device.auto
    seed: int = 0

    def __post_init__(self) -> None:
        check_once_each("batches", self.batches)
        for rows in self.batches:
            check_range("batches", rows, 1, INF)
        for name in ("n", "batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)


@dataclass
class BackfillConfig:
    """python -m eval.backfill."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 300  # articles of the test split, one of each family; None: all of them
    tolerance: float = 0.05  # whose certified threshold is used
    measure: Measure | None = None  # None: the one that dev picked
    least: int = 20  # articles that an average needs: positions and depths with fewer are left out
    batch_size: int = 64
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n is not None:
            check_range("n", self.n, 1, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        for name in ("least", "batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)


@dataclass
class LengthConfig:
    """python -m eval.length."""

    records: str | None = None  # folder of an eval.table1 run; default: the newest under runs/
    checkpoint: str | None = None  # whose tokenizer counts source tokens; default: the model of the records
    rows: list[str] = field(default_factory=list)  # of its table; default: those whose threshold is certified
    fewest: int = 30  # answers that must reach a position for it to be told
    shape: str = "small"  # random weights whose cost table predicts: tiny, small, base
    dtype: str | None = None  # fp32, bf16, int8; default: int8 where the native runner is, else fp32
    sources: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512])  # tokens; [] predicts nothing
    batches: list[int] = field(default_factory=lambda: [1, 8])
    outputs: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128])  # tokens of each answer
    measure: Measure = Measure.state  # whose mean depth of the paper's Table 1 the exits have, and whose price
    draws: int = 20  # batches of depths that a prediction is the mean of
    repeats: int = 15  # of which each entry of a cost table is the median
    threads: int = 1  # one is timed by its processor time, several by the wall clock
    bootstrap: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, SERVED_SHAPES)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, SERVED_DTYPES)
        for name in ("sources", "batches", "outputs"):
            if getattr(self, name) or name != "sources":
                check_once_each(name, getattr(self, name))
            for value in getattr(self, name):
                check_range(name, value, 1 if name == "batches" else 2, INF)
        for name in ("fewest", "draws", "repeats", "threads", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
