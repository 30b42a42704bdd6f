"""Settings of eval.length."""

from dataclasses import dataclass, field

from ..config import INF, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, SERVED_SHAPES, check_choice


@dataclass
class LengthConfig:
    """python -m eval.length."""

    records: str | None = None  # folder of an eval.table1 run; default: the newest under runs/
    checkpoint: str | None = None  # whose tokenizer counts source tokens; default: the model of the records
    rows: list[str] = field(default_factory=list)  # of its table; default: those whose threshold is certified
    fewest: int = 30  # answers that must reach a position for it to be told
    shape: str = "small"  # random weights whose cost table predicts: tiny, small, base
    dtype: str | None = None  # fp32, bf16, int8; default: int8 where the native runner is, else fp32
    sources: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512])  # tokens; [] predicts nothing
    batches: list[int] = field(default_factory=lambda: [1, 8])
    outputs: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128])  # tokens of each answer
    measure: Measure = Measure.state  # whose mean depth of the paper's Table 1 the exits have, and whose price
    draws: int = 20  # batches of depths that a prediction is the mean of
    repeats: int = 15  # of which each entry of a cost table is the median
    threads: int = 1  # one is timed by its processor time, several by the wall clock
    bootstrap: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, SERVED_SHAPES)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, SERVED_DTYPES)
        for name in ("sources", "batches", "outputs"):
            if getattr(self, name) or name != "sources":
                check_once_each(name, getattr(self, name))
            for value in getattr(self, name):
                check_range(name, value, 1 if name == "batches" else 2, INF)
        for name in ("fewest", "draws", "repeats", "threads", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
