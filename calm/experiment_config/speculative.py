"""Settings of eval.speculative."""

from dataclasses import dataclass, field

from ..config import INF, BatchRule, DataConfig, Measure, check_once_each, check_range
from .rounds import check_timed_answers


@dataclass
class SpeculativeConfig:
    """python -m eval.speculative."""

    checkpoint: str | None = None  # a model folder or a plain one; default: the newest model folder under runs/
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    dev_rows: int = 300  # of dev, on which drafts are chosen
    n: int | None = 500  # articles of the test split, simulated and decoded; None: all of them
    layers: list[int] = field(default_factory=list)  # whose words are drafts; []: every one below the last
    lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6])  # words of a draft at most
    measure: Measure = Measure.softmax  # that ends a draft
    thresholds: list[float] = field(default_factory=lambda: [0.0, 0.2, 0.4, 0.6, 0.8, 0.9])  # 0: by length alone
    drafts: int = 3  # of the best on dev, each of another layer, that are decoded and timed
    engine: bool = True  # decode and time them with the engine too
    peer: bool = True  # transformers' own early-exit drafts, of decoder-only models
    timed: int = 160  # of the articles, answered to their ends in turns
    static: list[int] = field(default_factory=list)  # fixed depths beside; []: half
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state])  # of the exits beside
    tolerance: float = 0.05  # that their thresholds are certified for
    rule: BatchRule = BatchRule.compact  # a row-exact one
    batches: list[int] = field(default_factory=lambda: [1, 4, 8])
    dtype: str | None = None  # fp32, bf16, int8; None: the first of int8, fp32, bf16 that is certified as it runs here
    batch_size: int = 32  # of the decodes that answers are compared of
    repeats: int = 6  # rounds, of which medians are taken
    warmups: int = 1
    attempts: int = 2  # at a batch size whose clocks are disturbed
    threads: int = 1
    allow_noisy: bool = False
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_timed_answers(self)
        for name in ("layers", "lengths", "static"):
            if getattr(self, name) or name == "lengths":
                check_once_each(name, getattr(self, name))
            for value in getattr(self, name):
                check_range(name, value, 1, INF)
        check_once_each("thresholds", self.thresholds)
        for threshold in self.thresholds:
            check_range("thresholds", threshold, 0, 1)
        for name in ("dev_rows", "drafts"):
            check_range(name, getattr(self, name), 1, INF)
