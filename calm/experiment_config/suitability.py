"""Settings of eval.suitability."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, Device, check_once_each, check_range


@dataclass
class SuitabilityConfig:
    """python -m eval.suitability."""

    checkpoint: str | None = None  # a model folder or a plain one; default: the newest model folder under runs/
    data: DataConfig | None = None  # default: as the model was trained; a plain folder needs one
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
