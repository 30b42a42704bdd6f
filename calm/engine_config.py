"""Settings of the programs that time engines or compare how they decode (eval.engine_rules, peers, throughput)."""

from dataclasses import dataclass, field

from .config import (
    INF,
    BatchRule,
    Consistency,
    DataConfig,
    Device,
    Head,
    Measure,
    RunnerName,
    TraceKind,
    Weights,
    check_once_each,
    check_range,
)
from .errors import ConfigError


@dataclass
class EngineRulesConfig:
    """python -m eval.engine_rules."""

    checkpoint: str | None = None
    data: DataConfig | None = None
    n: int | None = None  # articles of the test split; None: one per family, all of them
    measure: Measure | None = None  # None: the one that dev picked
    tolerance: float = 0.05
    consistency: Consistency = Consistency.risk
    rules: list[BatchRule] = field(
        default_factory=lambda: [
            BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.sync, BatchRule.quantile, BatchRule.lockstep
        ]
    )  # fmt: skip
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    quantile: float = 0.5  # share of rows that ends a step under rule quantile
    runner: RunnerName = RunnerName.auto
    device: Device = Device.auto
    processes: int | None = None
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        check_range("quantile", self.quantile, 0, 1, open_low=True)
        if not self.rules or not self.batch_sizes:
            raise ConfigError("rules and batch_sizes each need at least one entry")
        for size in self.batch_sizes:
            check_range("batch_sizes", size, 1, INF)


PEERS = (
    "transformers", "transformers-compiled", "ctranslate2-fp32", "ctranslate2-int8", "openvino", "onnxruntime"
)  # fmt: skip
SERVED_DTYPES = ("fp32", "bf16", "int8")


def served_numbers(dtype: str) -> tuple[str, Weights]:
    """Of one of SERVED_DTYPES: torch's name of what is not int8, and the layers' weights."""
    return "float32" if dtype == "fp32" else "bfloat16", Weights.int8 if dtype == "int8" else Weights.model


SERVED_SHAPES = ("tiny", "small", "base")


def check_choice(name: str, value: str, there: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is none of these."""
    if value not in there:
        raise ConfigError(f"{name}={value!r} is none; choose from {', '.join(there)}")


def _check_clock(config: "PeersConfig | ServingConfig") -> None:
    """What is timed, and how often."""
    for name in ("n", "threads", "few", "repeats", "attempts"):
        check_range(name, getattr(config, name), 1, INF)
    check_range("warmups", config.warmups, 0, INF)
    check_range("many", config.many, config.few + 1, INF)


@dataclass
class PeersConfig:
    """python -m eval.peers."""

    checkpoint: str | None = None  # a trained model on its articles, and ROUGE-L beside; default: random weights
    data: DataConfig | None = None
    n: int = 200  # articles that are answered to EOS for ROUGE-L
    shapes: list[str] = field(default_factory=lambda: ["small", "base"])  # of random weights: tiny, small, base
    sources: list[int] = field(default_factory=lambda: [128, 512])
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    base_sources: list[int] = field(default_factory=lambda: [128])  # shape base costs more: fewer cases
    base_batches: list[int] = field(default_factory=lambda: [1, 8])
    threads: int = 1
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    dtypes: list[str] = field(default_factory=lambda: list(SERVED_DTYPES))  # ours at full depth
    heads: list[Head] = field(default_factory=lambda: [Head.full, Head.screened])
    exit_dtypes: list[str] = field(default_factory=lambda: ["int8"])
    exit_heads: list[Head] = field(default_factory=lambda: [Head.full])
    measures: list[Measure] = field(default_factory=lambda: [Measure.state])
    rules: list[BatchRule] = field(default_factory=lambda: [BatchRule.own, BatchRule.compact])
    traces: list[TraceKind] = field(default_factory=lambda: [TraceKind.tight, TraceKind.wide])
    runner: RunnerName = RunnerName.native
    cross_kv: Weights = Weights.model  # of ours in int8: cross-attention K/V in bf16, or int8
    few: int = 8  # tokens; a decode step is what the tokens from few to many take
    many: int = 40
    repeats: int = 7
    warmups: int = 1
    attempts: int = 3  # at a case whose clocks are disturbed, before it is left out
    predict: bool = True  # measure a cost table and print what it predicts beside
    allow_noisy: bool = False
    environments: str = ".peers"  # of the peers whose libraries collide with ours; make peers sets them up
    work: str | None = None  # models and what peers convert them to; default: models/ under environments
    load_timeout: float = 3600.0  # seconds; includes converting and compiling
    call_timeout: float = 600.0
    merge: list[str] = field(default_factory=list)  # summary.json of earlier runs: one record of all, nothing measured
    seed: int = 0

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, ...]] = {
            "peers": PEERS, "shapes": SERVED_SHAPES, "dtypes": SERVED_DTYPES, "exit_dtypes": SERVED_DTYPES
        }  # fmt: skip
        for name, there in known.items():
            unknown = [value for value in getattr(self, name) if value not in there]
            if unknown:
                raise ConfigError(f"{name}: {unknown[0]!r} is none; choose from {', '.join(there)}")
        for name in ("sources", "batches", "base_sources", "base_batches"):
            for value in getattr(self, name):
                check_range(name, value, 2 if "sources" in name else 1, INF)
        for name in ("shapes", "batches", "dtypes", "heads"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; give at least one")
        if not self.sources or not self.base_sources or not self.base_batches:
            raise ConfigError("sources, base_sources and base_batches each need at least one entry")
        if any(kind not in (TraceKind.tight, TraceKind.wide) for kind in self.traces):
            raise ConfigError("traces: choose from tight and wide; eval.throughput replays measured ones")
        _check_clock(self)
        for name in ("load_timeout", "call_timeout"):
            check_range(name, getattr(self, name), 0, INF, open_low=True, open_high=True)


@dataclass
class ServingConfig:
    """python -m eval.throughput, python -m eval.latency: one run, Figure 1 and Figure 2."""

    checkpoint: str | None = None  # default: the newest model folder under runs/, else shape=small
    data: DataConfig | None = None  # of a folder: default the corpus that it was trained on
    n: int = 64  # articles of the test split that are answered to EOS
    tolerance: float = 0.05  # of a folder's certified thresholds
    consistency: Consistency = Consistency.risk
    shape: str | None = None  # random weights instead: tiny, small, base
    source_tokens: list[int] = field(default_factory=lambda: [128])  # of a shape
    traces: list[TraceKind] = field(default_factory=lambda: [TraceKind.tight])  # of a shape
    records: str | None = None  # of trace measured: records.parquet of eval.table1
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state, Measure.classifier])
    rules: list[BatchRule] = field(default_factory=lambda: [BatchRule.own, BatchRule.compact, BatchRule.sync])
    dtype: str = "fp32"  # fp32, bf16, or int8 weights (native runner; what is not weights in bf16)
    cross_kv: Weights = Weights.model
    runner: RunnerName = RunnerName.auto
    device: Device = Device.auto
    head: Head = Head.full  # of full and static depth, and of exits unless exit_heads says otherwise
    exit_heads: list[Head] = field(default_factory=list)  # that measures which read the vocabulary are timed with
    head_k: int = 32
    threads: int = 1
    few: int = 8  # tokens; a decode step is what the tokens from few to many take
    many: int = 40
    repeats: int = 5
    warmups: int = 1
    attempts: int = 3  # at a cell whose clocks are disturbed, before the machine is refused
    predict: bool = True  # measure a cost table and print what it predicts beside
    probe: bool = True  # measure the machine's ceilings
    allow_noisy: bool = False
    summary: str | None = None  # summary.json of an earlier run: draw it and measure nothing
    seed: int = 0

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.shape is not None:
            raise ConfigError("checkpoint= and shape= exclude each other: a trained model, or random weights")
        for name, value, there in (("shape", self.shape, SERVED_SHAPES), ("dtype", self.dtype, SERVED_DTYPES)):
            if value is not None:
                check_choice(name, value, there)
        for name in ("source_tokens", "traces", "batches", "measures", "rules", "exit_heads"):
            if getattr(self, name) or name != "exit_heads":
                check_once_each(name, getattr(self, name))
        for tokens in self.source_tokens:
            check_range("source_tokens", tokens, 2, INF)
        _check_clock(self)
        for rows in self.batches:
            check_range("batches", rows, 1, INF)
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        if TraceKind.static in self.traces:
            raise ConfigError("traces: static depth of the same mean is always timed; choose tight, wide or measured")
        if TraceKind.measured in self.traces and self.records is None:
            raise ConfigError("trace measured needs records=, the records.parquet of an eval.table1 run")
