"""Settings of eval.shallow."""

from dataclasses import dataclass, field

from ..config import INF, BatchRule, DataConfig, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, check_choice
from .rounds import check_rounds


@dataclass
class ShallowConfig:
    """python -m eval.shallow."""

    checkpoint: str | None = None  # the model with exits; default: the newest model folder under runs/
    shallow: list[str] = field(default_factory=list)  # model folders of fewer decoder layers, trained so
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 1000  # articles of the test split, one of each family; None: all of them
    timed: int = 160  # of these, answered to their ends in turns
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state, Measure.classifier])
    tolerance: float = 0.05  # whose certified thresholds are marked
    points: int = 3  # thresholds of a measure's calibration grid beside the certified one
    rule: BatchRule = BatchRule.compact  # a row-exact one
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    dtype: str | None = None  # fp32, bf16, int8; None: the first of int8, fp32, bf16 that is certified as it runs here
    batch_size: int = 32  # of the decodes that quality is measured on
    repeats: int = 6  # rounds, of which medians are taken
    warmups: int = 1
    attempts: int = 2  # at a batch size whose clocks are disturbed
    threads: int = 1
    allow_noisy: bool = False
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, SERVED_DTYPES)
        check_choice("rule", self.rule.value, ("own", "compact", "rebatch"))
        check_rounds(self)
        check_once_each("measures", self.measures)
        if self.n is not None:
            check_range("n", self.n, 2, INF)
        check_range("timed", self.timed, 2, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_range("points", self.points, 0, INF)
        for name in ("batch_size", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
