"""Settings of eval.uniformity."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, check_choice
from .rounds import check_rounds


@dataclass
class UniformityRunConfig:
    """python -m eval.uniformity."""

    checkpoint: str | None = None  # trained by the plain recipe; default: the newest model folder under runs/
    uniform: list[str] = field(default_factory=list)  # folders of models trained with finetune.uniformity.weight
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 600  # articles of the test split, one of each family; None: all of them
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state])
    points: int = 6  # thresholds of a measure's calibration grid
    batches: list[int] = field(default_factory=lambda: [8, 32])
    close: float = 0.01  # ROUGE-L below the plain model's full depth at which models are compared
    dtype: str = "fp32"  # fp32, bf16, int8 (native runner)
    timed: int = 160  # of the articles, answered to their ends in turns
    repeats: int = 6  # rounds, of which medians are taken
    warmups: int = 1
    attempts: int = 2  # at a batch size whose clocks are disturbed
    threads: int = 1
    allow_noisy: bool = False
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, SERVED_DTYPES)
        check_rounds(self)
        check_once_each("measures", self.measures)
        if self.n is not None:
            check_range("n", self.n, 1, INF)
        check_range("close", self.close, 0, 1)
        check_range("points", self.points, 2, INF)
        check_range("timed", self.timed, 2, INF)
        check_range("bootstrap", self.bootstrap, 1, INF)
