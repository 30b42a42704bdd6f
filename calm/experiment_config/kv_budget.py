"""Settings of eval.kv_budget."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, Device, Measure, check_once_each, check_range


@dataclass
class KvBudgetConfig:
    """python -m eval.kv_budget."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 1000  # articles of the test split, one of each family; None: all of them
    calibrated: int = 300  # articles of dev, whose exits the table of errors is made from
    bins: int = 4  # of the cosine in that table
    least: int = 20  # exits that a cell of it needs
    tolerance: float = 0.05  # whose certified threshold is used
    measure: Measure | None = None  # None: the one that dev picked
    budgets: list[float] = field(default_factory=lambda: [0.25, 0.5, 1.0, 2.0, 4.0])  # of error, see calm/kv_budget.py
    every: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # exits before a step at full depth: the control
    points: int = 4  # higher thresholds without a budget, spread over the calibration grid
    batch_size: int = 64
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n is not None:
            check_range("n", self.n, 2, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        for name in ("budgets", "every"):
            check_once_each(name, getattr(self, name))
        for budget in self.budgets:
            check_range("budgets", budget, 0, INF)
        for count in self.every:
            check_range("every", count, 1, INF)
        check_range("points", self.points, 0, INF)
        for name in ("calibrated", "bins", "least", "batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
