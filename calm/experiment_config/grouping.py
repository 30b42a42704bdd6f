"""Settings of eval.grouping."""

from dataclasses import dataclass, field

from ..config import INF, RunnerName, check_once_each, check_range
from ..errors import ConfigError


@dataclass
class GroupingConfig:
    """python -m eval.grouping."""

    records: str | None = None  # folder of an eval.table1 run; default: the newest under runs/
    checkpoint: str | None = None  # that was recorded; default: the model beside the records
    rows: list[str] = field(default_factory=list)  # of its table; default: the picked one, and state where certified
    batches: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])
    pools: list[int] = field(default_factory=lambda: [4, 16])  # batches of requests that a grouping chooses from
    quantiles: list[float] = field(default_factory=lambda: [0.9])  # beside own and sync
    recent: int = 3  # crossing layers of a row that tell the next one
    draws: int = 30  # halves of the articles, in an order of arrival
    folds: int = 10  # of the cross-fitted predictor
    bins: int = 10  # of its predictions
    price_repeats: int = 15  # of which each entry of the cost table is the median
    timed_batches: list[int] = field(default_factory=lambda: [8, 32])  # first row only; [] times nothing
    timed: int = 256  # articles that a timed engine answers
    repeats: int = 5
    warmups: int = 1
    threads: int = 1  # one is timed by its processor time, several by the wall clock
    runner: RunnerName = RunnerName.auto
    allow_noisy: bool = False
    bootstrap: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "pools", "quantiles", "timed_batches"):
            if getattr(self, name) or name in ("batches", "pools"):
                check_once_each(name, getattr(self, name))
        for name in ("batches", "timed_batches"):
            for value in getattr(self, name):
                check_range(name, value, 1, INF)
        for pool in self.pools:
            check_range("pools", pool, 2, INF)
        for share in self.quantiles:
            check_range("quantiles", share, 0, 1, open_low=True)
        for name in ("recent", "bins", "price_repeats", "repeats", "threads", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        for name in ("draws", "folds", "timed"):
            check_range(name, getattr(self, name), 2, INF)
        check_range("warmups", self.warmups, 0, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
        if self.runner is RunnerName.graph:
            raise ConfigError("runner=graph: grouping is priced and timed on a CPU; choose native, eager or auto")
