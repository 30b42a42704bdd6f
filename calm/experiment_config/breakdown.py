"""Settings of eval.breakdown."""

from dataclasses import dataclass, field

from ..config import INF, BatchRule, DataConfig, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, check_choice
from ..errors import ConfigError
from .rounds import check_rounds


@dataclass
class BreakdownConfig:
    """python -m eval.breakdown."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int = 128  # articles of the test split that every way answers to their ends
    tolerance: float = 0.05  # whose certified threshold is used
    measure: Measure | None = None  # None: the one that dev picked
    dtype: str | None = None  # fp32, bf16, int8; None: the first of int8, fp32, bf16 that is certified as it runs here
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    rules: list[BatchRule] = field(default_factory=lambda: [BatchRule.own, BatchRule.compact])
    repeats: int = 9  # rounds, of which medians are taken
    warmups: int = 1
    attempts: int = 2  # at a batch size whose clocks are disturbed, before it is left out
    threads: int = 1  # one is timed by its processor time, several by the wall clock
    allow_noisy: bool = False
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_rounds(self)
        check_once_each("rules", self.rules)
        unfit = [rule.value for rule in self.rules if rule not in (BatchRule.own, BatchRule.compact)]
        if unfit:
            raise ConfigError(f"rules: {unfit[0]} has no fixed set of rows in a step; choose from own and compact")
        if self.dtype is not None:
            check_choice("dtype", self.dtype, SERVED_DTYPES)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_range("n", self.n, 2, INF)
        check_range("bootstrap", self.bootstrap, 1, INF)
