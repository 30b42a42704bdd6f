"""Settings of eval.slowest_row."""

from dataclasses import dataclass, field

from ..config import INF, check_once_each, check_range


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
    decoded: list[int] = field(default_factory=lambda: [8, 32])  # batches that the engine decodes; [] decodes nothing
    n: int = 320  # articles that it decodes
    bootstrap: int = 1_000
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
        for rows in self.decoded:
            check_range("decoded", rows, 1, INF)
        for name in ("n", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("draws", self.draws, 2, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
