"""Settings of eval.invariance."""

from dataclasses import dataclass, field

from ..config import (
    INF,
    BatchRule,
    DataConfig,
    Device,
    Measure,
    RunnerName,
    check_once_each,
    check_range,
)
from ..engine_config import SERVED_DTYPES, check_choice
from ..errors import ConfigError

ORDERS = ("given", "shuffled")  # in which articles arrive


@dataclass
class InvarianceConfig:
    """python -m eval.invariance."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 300  # articles of the test split, one of each family; None: all of them
    tolerance: float = 0.05  # whose certified threshold is used
    measure: Measure | None = None  # None: the one that dev picked
    rules: list[BatchRule] = field(
        default_factory=lambda: [
            BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.sync, BatchRule.quantile, BatchRule.lockstep
        ]
    )  # fmt: skip
    quantile: float = 0.5  # share of rows that ends a step under rule quantile
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    orders: list[str] = field(default_factory=lambda: list(ORDERS))
    runner: RunnerName = RunnerName.auto  # of all dtypes
    dtypes: list[str] = field(default_factory=lambda: list(SERVED_DTYPES))
    eager_dtypes: list[str] = field(default_factory=lambda: ["fp32"])  # of plain torch, beside that runner
    eager_orders: list[str] = field(default_factory=lambda: ["shuffled"])  # there: it takes ten times as long
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rules", "batches", "orders", "dtypes", "eager_orders"):
            check_once_each(name, getattr(self, name))
        if self.eager_dtypes:
            check_once_each("eager_dtypes", self.eager_dtypes)
        if "int8" in self.eager_dtypes:
            raise ConfigError("eager_dtypes: int8 needs runner=native; choose from fp32, bf16")
        for names, there in ((("dtypes", "eager_dtypes"), SERVED_DTYPES), (("orders", "eager_orders"), ORDERS)):
            for name in names:
                for value in getattr(self, name):
                    check_choice(name, value, there)
        for rows in self.batches:
            check_range("batches", rows, 1, INF)
        if self.n is not None:
            check_range("n", self.n, 2, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_range("quantile", self.quantile, 0, 1, open_low=True)
        check_range("bootstrap", self.bootstrap, 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
