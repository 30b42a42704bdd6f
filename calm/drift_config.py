"""Settings of python -m eval.drift; values in ``conf/drift.yaml``."""

from dataclasses import dataclass, field
from typing import Any

from .config import (
    CONF_DIR,
    INF,
    Consistency,
    DataConfig,
    Device,
    Measure,
    OnDrift,
    RunnerName,
    check_once_each,
    check_range,
)


@dataclass
class DriftConfig:
    """python -m eval.drift."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # usual traffic, by its test split; default: as the model was trained
    traffic: DataConfig | None = None  # traffic=NAME, as data=NAME: what comes after it, by its test split
    n: int | None = 2_000  # requests of each, as far as the split has them; None: all of them
    tolerance: float = 0.05
    consistency: Consistency = Consistency.risk
    measure: Measure | None = None  # None: the one that dev picked
    # warn is served in any case: the others are compared with it
    on_drift: list[OnDrift] = field(default_factory=lambda: [OnDrift.warn, OnDrift.conservative, OnDrift.full])
    requests_per_alarm: float = 100_000.0  # as of the server
    drift_patience: int = 1_000  # answers at a safer threshold after which the one before is tried again
    shuffles: int = 20  # orders of the recorded answers in which alarms are counted
    batch_size: int = 32  # rows that decode at once, and requests in flight
    runner: RunnerName = RunnerName.auto
    device: Device = Device.auto
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n is not None:
            check_range("n", self.n, 1, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_once_each("on_drift", self.on_drift)
        check_range("requests_per_alarm", self.requests_per_alarm, 1, INF, open_high=True)
        for name in ("drift_patience", "shuffles", "batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)


def traffic_choices() -> dict[str, Any]:
    """Of the group ``traffic``: each corpus of ``conf/data`` by its name, as Hydra nodes."""
    names = sorted(path.stem for path in (CONF_DIR / "data").glob("*.yaml"))
    return {name: {"defaults": [{"/data@_here_": name}]} for name in names}
