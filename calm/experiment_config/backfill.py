"""Settings of eval.backfill."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, Device, Measure, check_once_each, check_range


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
    clock_batches: list[int] = field(default_factory=lambda: [1, 8, 32])  # at which filling is timed; [] times nothing
    clock_repeats: int = 15  # of which a time is the median
    passes: list[int] = field(default_factory=lambda: [2, 4, 8])  # positions that `true` takes up at once, batch 1
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n is not None:
            check_range("n", self.n, 1, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        for name in ("least", "batch_size", "bootstrap", "clock_repeats"):
            check_range(name, getattr(self, name), 1, INF)
        if self.passes:
            check_once_each("passes", self.passes)
        for count in self.passes:
            check_range("passes", count, 2, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
