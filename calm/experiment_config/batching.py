"""Settings of eval.batching."""

from dataclasses import dataclass, field

from ..config import INF, BatchRule, DataConfig, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, check_choice
from ..errors import ConfigError
from .rounds import check_rounds


@dataclass
class BatchingConfig:
    """python -m eval.batching."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int = 256  # articles of the test split that every way answers to their ends
    tolerance: float = 0.05  # whose certified threshold is used
    measure: Measure | None = None  # None: the one that dev picked
    dtype: str | None = None  # fp32, bf16, int8; None: the first of int8, fp32, bf16 that is certified as it runs here
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])  # measured
    simulated: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])
    rules: list[BatchRule] = field(
        default_factory=lambda: [
            BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.sync, BatchRule.quantile, BatchRule.lockstep
        ]
    )  # fmt: skip
    quantiles: list[float] = field(default_factory=lambda: [0.5, 0.9])  # shares of rule quantile
    repeats: int = 6  # rounds, of which medians are taken
    warmups: int = 1
    attempts: int = 2  # at a batch size whose clocks are disturbed, before it is left out
    table_repeats: int = 7  # of which each entry of a cost table is the median
    threads: int = 1
    allow_noisy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for rows in (*self.batches, *self.simulated):
            check_range("batches and simulated", rows, 1, INF)
        check_rounds(self)
        for name in ("simulated", "rules", "quantiles"):
            if getattr(self, name) or name not in ("simulated", "quantiles"):
                check_once_each(name, getattr(self, name))
        if BatchRule.auto in self.rules:
            raise ConfigError("rules: auto is a choice among own, compact and rebatch; give those")
        if BatchRule.quantile in self.rules and not self.quantiles:
            raise ConfigError("rule quantile needs quantiles=[...], the shares of crossed rows that end a step")
        for share in self.quantiles:
            check_range("quantiles", share, 0, 1, open_low=True)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, SERVED_DTYPES)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_range("n", self.n, 2, INF)
        check_range("table_repeats", self.table_repeats, 1, INF)
