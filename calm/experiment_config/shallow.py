"""Settings of eval.shallow."""

from dataclasses import dataclass, field

from ..config import INF, BatchRule, DataConfig, Measure, check_range
from .rounds import check_timed_answers


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
        check_timed_answers(self)
        check_range("points", self.points, 0, INF)
