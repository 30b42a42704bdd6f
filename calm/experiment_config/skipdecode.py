"""Settings of eval.skipdecode."""

from dataclasses import dataclass, field

from ..config import INF, DataConfig, Measure, check_once_each, check_range


@dataclass
class SkipDecodeConfig:
    """python -m eval.skipdecode."""

    checkpoint: str | None = None  # the model of full depth, 1x; default: the newest model folder under runs/
    scheduled: list[str] = field(default_factory=list)  # folders trained with finetune.skip_schedule, of either side
    variants: list[str] = field(default_factory=list)  # other schedules of side top, each beside that of variants_of
    variants_of: int = 3  # a speed-up among ``scheduled``
    exits: str | None = None  # a folder whose layers all speak, for CALM-DEC; None: no such rows
    merge: list[str] = field(default_factory=list)  # summary.json of earlier runs: one record of all, nothing measured
    data: DataConfig | None = None  # default: the corpus that the model was trained on
    n: int | None = 1000  # articles of the test split, one of each family; None: all of them
    speedups: list[int] = field(default_factory=lambda: [2, 3, 4, 5])  # of CALM-DEC, in layers
    measure: Measure = Measure.state  # CALM-DEC's, as the paper's saturation of hidden states
    dev_rows: int = 300  # on which the thresholds of these speed-ups are sought
    search: int = 12  # decodes of dev for each of them
    paper: str = "e2e"  # whose numbers stand beside: e2e, reddit_tldr, cnn_dm
    paper_model: str = "opt_1_3b"  # or opt_6_7b
    batches: list[int] = field(default_factory=lambda: [1, 8])  # at which the clock is read; []: no clock
    slots: list[int] = field(default_factory=lambda: [8, 32])  # of a batch that requests join and leave, counted
    batch_size: int = 32  # of the decodes to EOS that quality is measured on
    few: int = 2  # tokens; a decode step is what the tokens from few to many take
    many: int = 20
    repeats: int = 9
    warmups: int = 1
    attempts: int = 3  # at a batch size whose clocks are disturbed
    threads: int = 1
    allow_noisy: bool = False
    bootstrap: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_once_each("speedups", self.speedups)
        for times in self.speedups:
            check_range("speedups", times, 2, INF)
        if self.batches:
            check_once_each("batches", self.batches)
        for rows in (*self.batches, *self.slots):
            check_range("batches and slots", rows, 1, INF)
        if self.n is not None:
            check_range("n", self.n, 1, INF)
        check_range("variants_of", self.variants_of, 2, INF)
        for name in ("dev_rows", "search", "batch_size", "few", "repeats", "attempts", "threads", "bootstrap"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("many", self.many, self.few + 1, INF)
        check_range("warmups", self.warmups, 0, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
