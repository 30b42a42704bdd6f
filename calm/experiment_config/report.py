"""Settings of eval.report."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, TrackingConfig, check_range


@dataclass
class ReportConfig:
    """python -m eval.report."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    # folder of an eval.table1 run; default: the folder above the checkpoint where it is one, else table1 is run first
    records: str | None = None
    only: list[str] = field(default_factory=list)  # names of experiments; default: all of them
    skip: list[str] = field(default_factory=list)
    run: bool = True  # False collects what is there and makes the page
    found: list[str] = field(default_factory=list)  # run folders made elsewhere: of trainings, or of other days
    overrides: dict[str, list[str]] = field(default_factory=dict)  # by experiment, beside its checkpoint and records
    minutes: float | None = None  # that one experiment may take; None: as long as it needs
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.minutes is not None:
            check_range("minutes", self.minutes, 0, INF, open_low=True)
