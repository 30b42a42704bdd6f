"""Every setting, once: dataclass schemas and enums. YAML under ``conf/`` holds values only.

Programs compose YAML over these schemas with Hydra and turn the result into plain objects once, at the
border; below it nobody sees a DictConfig. Range checks live in ``__post_init__`` and raise ConfigError.
Importing this module does not import hydra; ``register()`` does.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from .errors import FP16_REFUSED, ConfigError
from .finetune_config import Curriculum, ExitCurriculumConfig, LayerDropoutConfig, LoraConfig
from .layer_schedule import Decay, LayerSchedule, Side
from .typed import typed

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
MISSING: Any = "???"


class Stage(str, Enum):
    all = "all"
    finetune = "finetune"
    classifier = "classifier"
    calibrate = "calibrate"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(str, Enum):
    """Arithmetic of training (autocast) or of a decode; fp16 is named only to be refused with the reason."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Measure(str, Enum):
    softmax = "softmax"
    state = "state"
    classifier = "classifier"
    max_prob = "max_prob"
    entropy = "entropy"
    agreement = "agreement"


class Schedule(str, Enum):
    """``auto`` lets the dev split choose between constant and decaying; ``decaying_released`` is t5x's variant."""

    auto = "auto"
    constant = "constant"
    decaying = "decaying"
    decaying_released = "decaying_released"


class Backfill(str, Enum):
    project = "project"
    true = "true"
    copy = "copy"
    mask = "mask"


class ExitLoss(str, Enum):
    weighted = "weighted"
    uniform = "uniform"
    last_plus_mean = "last_plus_mean"
    layerskip = "layerskip"
    final_only = "final_only"


class ClassifierLoss(str, Enum):
    independent = "independent"
    geometric = "geometric"


class OptimizerName(str, Enum):
    adamw = "adamw"
    adafactor = "adafactor"
    muon = "muon"


class LrSchedule(str, Enum):
    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class Consistency(str, Enum):
    risk = "risk"
    textual = "textual"


class RowPolicy(str, Enum):
    error = "error"
    skip = "skip"


class Truncate(str, Enum):
    """Which tokens of a long source are kept: the first, or the first two thirds and the last third."""

    head = "head"
    head_tail = "head_tail"


class Pretext(str, Enum):
    """Which pairs are made of a corpus' rows: their own, or those of a task to learn before (calm/data/pretext.py)."""

    none = "none"
    gap_sentences = "gap_sentences"


class DecoderName(str, Enum):
    batch = "batch"
    one = "one"
    engine = "engine"


class OnDrift(str, Enum):
    """What a server does where traffic is not like what a threshold was certified on."""

    warn = "warn"
    conservative = "conservative"  # the next safer certified threshold, and so on
    full = "full"


class Preempt(str, Enum):
    """How a row whose blocks were needed comes back: with a copy of its K/V, or by doing again what it did."""

    swap = "swap"
    replay = "replay"


class Head(str, Enum):
    full = "full"
    screened = "screened"
    candidates = "candidates"


class RunnerName(str, Enum):
    """Who runs the engine's layers: plain torch, the compiled step of a CPU, or the step that stays on a device.

    ``auto`` takes the last on a GPU, the second on a CPU where it can be had, and else the first.
    """

    auto = "auto"
    eager = "eager"
    native = "native"
    graph = "graph"


class Stepping(str, Enum):
    """How the graph runner ends a step early: by kernels that find nobody left, by pieces, by branches in the graph."""

    whole = "whole"
    segments = "segments"
    branches = "branches"


class Weights(str, Enum):
    """Weights of the engine's layers: in the dtype that the model was loaded in, or int8 (native runner)."""

    model = "model"
    int8 = "int8"


class BatchRule(str, Enum):
    """Row-exact: own, compact, rebatch, and auto among them. Batch-coupled: sync, quantile, lockstep."""

    own = "own"
    compact = "compact"
    rebatch = "rebatch"
    auto = "auto"
    sync = "sync"
    quantile = "quantile"
    lockstep = "lockstep"


class StepShape(str, Enum):
    """Of the training-step benchmark: the demo's model, or T5 v1.1 small's shape."""

    tiny = "tiny"
    small = "small"


class TraceKind(str, Enum):
    """Where the depths of a timed request come from (calm/traces.py)."""

    tight = "tight"
    wide = "wide"
    measured = "measured"
    static = "static"


class TrackingMode(str, Enum):
    """Of W&B; ``auto`` is online when a key is set, else offline. metrics.jsonl is written in every mode."""

    auto = "auto"
    offline = "offline"
    online = "online"
    disabled = "disabled"


def check_once_each(name: str, values: Collection[Any]) -> None:
    """Raise ConfigError for a list that is empty, or names something twice."""
    if not values or len(set(values)) != len(values):
        raise ConfigError(f"{name} needs at least one entry, and none twice")


def check_range(
    name: str,
    value: int | float,
    low: int | float,
    high: int | float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise ConfigError unless value lies in the interval; NaN never does."""
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ConfigError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value}")


class Architecture(str, Enum):
    """Of models from scratch; published ones say theirs in config.json."""

    t5 = "t5"
    llama = "llama"


PREFILL_ROWS, SOURCE_MULTIPLE = 4, 16  # of an engine's encoder calls, where nobody says otherwise
INF = float("inf")


@dataclass
class ShapeConfig:
    """A model built from scratch. ``tied`` shares input and output embedding (a T5's head is then scaled by d^-0.5)."""

    architecture: Architecture = Architecture.t5
    vocab_size: int = 400
    d_model: int = 128
    d_kv: int = 32
    num_heads: int = 4
    num_kv_heads: int | None = None  # llama: heads of K and V, each for as many neighbouring queries; None: num_heads
    d_ff: int = 256
    num_layers: int = 1  # of the encoder; llama: 0
    num_decoder_layers: int = 8
    dropout_rate: float = 0.0  # llama: of attention weights, the only dropout that it has
    tied: bool = True
    lowercase: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_kv", "num_heads", "d_ff", "num_decoder_layers"):
            check_range(f"model.shape.{name}", getattr(self, name), 1, INF)
        check_range("model.shape.dropout_rate", self.dropout_rate, 0, 1, open_high=True)
        if self.architecture is Architecture.llama:
            self._check_llama()
            return
        check_range("model.shape.num_layers", self.num_layers, 1, INF)
        if self.num_kv_heads is not None:
            raise ConfigError(
                "model.shape.num_kv_heads: a T5 has one head of K and V for each of num_heads; leave it out"
            )

    def _check_llama(self) -> None:
        if self.num_layers != 0:
            raise ConfigError(
                f"model.shape.num_layers={self.num_layers} counts encoder layers, and a llama has none; give 0, and "
                "its depth as num_decoder_layers"
            )
        if self.d_kv % 2:
            raise ConfigError(f"model.shape.d_kv={self.d_kv}: a llama turns halves of a head, so give an even number")
        if self.num_kv_heads is not None:
            check_range("model.shape.num_kv_heads", self.num_kv_heads, 1, self.num_heads)
            if self.num_heads % self.num_kv_heads:
                raise ConfigError(
                    f"model.shape.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: every "
                    "head of K and V serves as many queries"
                )


@dataclass
class ModelConfig:
    """An architecture: ``pretrained`` names a published checkpoint (hub id or folder); else ``shape`` is built."""

    name: str = MISSING
    pretrained: str | None = None
    shape: ShapeConfig | None = None

    def __post_init__(self) -> None:
        if (self.pretrained is None) == (self.shape is None):
            raise ConfigError(f"model {self.name!r}: give exactly one of model.pretrained and model.shape")


@dataclass
class SplitConfig:
    """Shares of the families; train takes the rest. A row's split is a hash of its family."""

    dev: float = 0.03
    calibration: float = 0.08
    test: float = 0.08

    def __post_init__(self) -> None:
        for name in ("dev", "calibration", "test"):
            check_range(f"data.split.{name}", getattr(self, name), 0, 1, open_low=True, open_high=True)
        if self.dev + self.calibration + self.test >= 1:
            raise ConfigError("data.split.dev + calibration + test must stay below 1: nothing is left for train")


@dataclass
class DataConfig:
    """A corpus and how its rows become token ids. ``name`` chooses the reader in calm/data."""

    name: str = MISSING
    path: str | None = None  # jsonl / parquet file or folder; for hub corpora a local folder of its Parquet files
    text_column: str = "source"
    summary_column: str = "target"
    family_column: str | None = None
    id_column: str | None = None
    source_prefix: str = ""
    max_source_tokens: int = 512
    max_target_tokens: int = 128  # N: also the longest answer that is generated, EOS included
    truncate: Truncate = Truncate.head
    min_source_words: int = 0
    max_article_tokens: int | None = None  # the paper's filter: longer articles are left out
    size: int = 40_000  # generated corpora only: rows before splitting
    max_train_rows: int | None = None
    max_eval_rows: int | None = None  # cap on each of dev, calibration, test after one row per family
    row_policy: RowPolicy = RowPolicy.error
    pretext: Pretext = Pretext.none
    targets: str | None = None  # JSONL of id and target (eval.relabel): the train rows that it names, with its targets
    cache_dir: str | None = None  # default: $CALM_CACHE, else ~/.cache/calm
    split: SplitConfig = field(default_factory=SplitConfig)

    def __post_init__(self) -> None:
        check_range("data.max_source_tokens", self.max_source_tokens, 2, INF)
        check_range("data.max_target_tokens", self.max_target_tokens, 1, INF)
        check_range("data.size", self.size, 1, INF)
        check_range("data.min_source_words", self.min_source_words, 0, INF)
        for name in ("max_article_tokens", "max_train_rows", "max_eval_rows"):
            value = getattr(self, name)
            if value is not None:
                check_range(f"data.{name}", value, 1, INF)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "DataConfig":
        """From plain values, as a model folder's early_exit.json keeps them. Raises ConfigError for what is none."""
        try:
            return typed(cls, values)
        except ConfigError as error:
            raise ConfigError(f"these are no settings of a corpus: {error}; give data=NAME") from None


@dataclass
class UniformityConfig:
    """Rows of a training batch should cross at one layer (calm.uniformity)."""

    weight: float = 0.0  # of the variance of the expected crossing layer, as a share of the depth; 0: off
    measure: Measure = Measure.state  # state or softmax, which reads the vocabulary after every layer
    threshold: float = 0.97
    temperature: float = 0.02  # of the soft crossing, in units of the confidence

    def __post_init__(self) -> None:
        check_range("finetune.uniformity.weight", self.weight, 0, INF, open_high=True)
        check_range("finetune.uniformity.threshold", self.threshold, 0, 1)
        check_range("finetune.uniformity.temperature", self.temperature, 0, INF, open_low=True, open_high=True)
        if self.measure not in (Measure.state, Measure.softmax):
            raise ConfigError(f"finetune.uniformity.measure={self.measure.value}: choose state or softmax")


@dataclass
class SkipScheduleConfig:
    """Decoder layers by position (calm.layer_schedule), in training and then in decoding; off without max_layers."""

    max_layers: int | None = None  # at the first generated token
    min_layers: int | None = None  # at the longest answer's end; None: max_layers, the same everywhere
    warmup_layers: int = 1
    decay: Decay = Decay.linear
    power: float = 1.0
    side: Side = Side.top

    def __post_init__(self) -> None:
        self.over(1)

    def over(self, length: int) -> LayerSchedule | None:
        """The schedule of answers of at most ``length`` tokens; None where it is off. Raises ConfigError."""
        if self.max_layers is None:
            return None
        least = self.max_layers if self.min_layers is None else self.min_layers
        return LayerSchedule(self.max_layers, least, length, self.warmup_layers, self.decay, self.power, self.side)


@dataclass
class FinetuneConfig:
    """Stage 1: all layers learn to speak (CALM section 3.4, eq. 6)."""

    steps: int = 10_000
    batch_size: int = 64  # rows per optimizer step, over all processes and accumulation
    accumulation: int = 1
    one_per_family: bool = False  # an epoch is one row of each family, as the test split has, instead of every row
    lr: float = 1e-3
    lr_schedule: LrSchedule = LrSchedule.linear
    warmup_steps: int = 200
    optimizer: OptimizerName = OptimizerName.adamw
    beta2: float = 0.999  # AdamW's; 0.98 forgets faster, which suits short runs
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    loss: ExitLoss = ExitLoss.weighted
    exit_scale: float = 0.2  # LayerSkip's e_scale, of loss=layerskip
    exits_only: bool = False  # a loss at exit_layers and the last layer only, instead of at every layer
    rotate: int = 0  # 0: every layer in every step; m: the last layer and m others drawn by weight
    distill: float = 0.0  # share of the earlier layers' loss that follows the last layer instead of the label
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    uniformity: UniformityConfig = field(default_factory=UniformityConfig)
    skip_schedule: SkipScheduleConfig = field(default_factory=SkipScheduleConfig)
    exit_curriculum: ExitCurriculumConfig = field(default_factory=ExitCurriculumConfig)
    layer_dropout: LayerDropoutConfig = field(default_factory=LayerDropoutConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dropout_rate: float | None = None  # None: as the checkpoint says
    gradient_checkpointing: bool = False
    log_every: int = 50
    eval_every: int = 1_000
    eval_rows: int = 200
    save_every: int = 1_000
    keep: int = 2
    max_bad_steps: int = 5

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "accumulation",
            "log_every",
            "eval_every",
            "eval_rows",
            "save_every",
            "keep",
            "max_bad_steps",
        ):
            check_range(f"finetune.{name}", getattr(self, name), 1, INF)
        for name in ("steps", "warmup_steps", "rotate", "weight_decay", "z_loss"):
            check_range(f"finetune.{name}", getattr(self, name), 0, INF)
        check_range("finetune.lr", self.lr, 0, INF, open_low=True, open_high=True)
        check_range("finetune.clip_norm", self.clip_norm, 0, INF, open_low=True)
        check_range("finetune.beta2", self.beta2, 0, 1, open_high=True)
        check_range("finetune.distill", self.distill, 0, 1)
        check_range("finetune.exit_scale", self.exit_scale, 0, INF, open_high=True)
        check_range("finetune.label_smoothing", self.label_smoothing, 0, 1, open_high=True)
        if self.dropout_rate is not None:
            check_range("finetune.dropout_rate", self.dropout_rate, 0, 1, open_high=True)
        if self.skip_schedule.max_layers is not None and (
            self.loss,
            self.uniformity.weight,
            self.layer_dropout.p_max,
        ) != (ExitLoss.final_only, 0.0, 0.0):
            raise ConfigError(
                "finetune.skip_schedule trains the layer that speaks alone: give finetune.loss=final_only and no "
                "finetune.uniformity or finetune.layer_dropout"
            )
        if self.exit_curriculum.kind is not Curriculum.none and self.rotate:
            raise ConfigError(
                "finetune.exit_curriculum and finetune.rotate both choose the layers of a step; give one of them"
            )


@dataclass
class ClassifierConfig:
    """Stage 2: the exit classifier on the frozen backbone (CALM section 3.4)."""

    steps: int = 500
    batch_size: int = 64
    lr: float = 1e-2
    warmup_steps: int = 20
    loss: ClassifierLoss = ClassifierLoss.independent
    tokens: int | None = None  # target tokens of the train split that are read; None: 50,000, of a wide model more
    exits_only: bool = False  # learns from the layers of exit_layers alone, instead of from all below the last
    precision: Precision = Precision.fp32  # of the frozen layers; what they say is asked in fp32
    log_every: int = 50
    eval_rows: int = 500

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_range("classifier.tokens", self.tokens, 1, INF)
        if self.precision is Precision.fp16:
            raise ConfigError(f"classifier.precision={FP16_REFUSED}")
        for name in ("batch_size", "log_every", "eval_rows"):
            check_range(f"classifier.{name}", getattr(self, name), 1, INF)
        for name in ("steps", "warmup_steps"):
            check_range(f"classifier.{name}", getattr(self, name), 0, INF)
        check_range("classifier.lr", self.lr, 0, INF, open_low=True, open_high=True)


@dataclass
class CalibrationConfig:
    """Learn-then-Test (CALM section 4): which measures, which loss, how sure (CALM's delta and epsilon)."""

    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state, Measure.classifier])
    consistency: Consistency = Consistency.risk
    tolerances: list[float] = field(default_factory=lambda: [0.05])
    error_prob: float = 0.05
    n: int | None = None  # None: every family of the calibration split
    grid_size: int = 20  # thresholds below 1.0, from confidence quantiles on dev
    per_layer: bool = False  # one threshold per layer, along a path of per-layer quantiles fixed on dev
    dev_rows: int = 300
    schedule: Schedule = Schedule.auto
    tau: float = 4.0
    agreement_k: int = 3
    backfill: Backfill = Backfill.project
    decoder: DecoderName = DecoderName.batch
    head: Head = Head.full
    head_k: int = 32  # words that the other heads look at exactly
    runner: RunnerName = RunnerName.auto  # of decoder=engine
    weights: Weights = Weights.model
    cross_kv: Weights = Weights.model
    batch_size: int = 64
    complete: bool = False  # decode the whole grid, also below the first failure

    def __post_init__(self) -> None:
        if not self.measures:
            raise ConfigError("calibration.measures is empty; choose from " + ", ".join(m.value for m in Measure))
        if len(set(self.measures)) != len(self.measures):
            raise ConfigError("calibration.measures names a measure twice")
        if not self.tolerances:
            raise ConfigError("calibration.tolerances is empty; give at least one, such as [0.05]")
        for value in self.tolerances:
            check_range("calibration.tolerances", value, 0, 1, open_low=True, open_high=True)
        check_range("calibration.error_prob", self.error_prob, 0, 1, open_low=True, open_high=True)
        check_range("calibration.grid_size", self.grid_size, 1, INF)
        check_range("calibration.dev_rows", self.dev_rows, 1, INF)
        check_range("calibration.tau", self.tau, 0, INF, open_high=True)
        check_range("calibration.agreement_k", self.agreement_k, 1, INF)
        check_range("calibration.batch_size", self.batch_size, 1, INF)
        check_range("calibration.head_k", self.head_k, 2, INF)
        if self.n is not None:
            check_range("calibration.n", self.n, 1, INF)


@dataclass
class TrackingConfig:
    """Weights & Biases; metrics.jsonl is written whatever stands here."""

    mode: TrackingMode = TrackingMode.auto
    project: str = "calm-t5"
    group: str | None = None  # default: architecture and corpus, as in tiny-restaurants
    tags: list[str] = field(default_factory=list)
    upload_model: bool = False  # a trained model's files, too; without it W&B gets their hashes


def check_exits(exit_layers: list[int] | None, min_exit_layer: int) -> None:
    check_range("min_exit_layer", min_exit_layer, 1, INF)
    if exit_layers is not None:
        if not exit_layers or sorted(set(exit_layers)) != exit_layers or exit_layers[0] < 1:
            raise ConfigError(f"exit_layers must be ascending layer counts from 1, each once, got {exit_layers}")


@dataclass
class TrainConfig:
    """python -m train."""

    model: ModelConfig | None = None  # +model=NAME; None where checkpoint= or resume= says which
    data: DataConfig = field(default_factory=DataConfig)
    stage: Stage = Stage.all
    checkpoint: str | None = None  # a model folder to go on from; excludes +model=
    decoder_layers: int | None = None  # of checkpoint=: its first so many decoder layers alone, a shallower model
    tokenised: str | None = None  # a file of token ids of the corpus' texts (calm/data/tokenised.py); others are made
    resume: str | None = None  # a run folder, or one of its checkpoints/step-N
    allow_override: list[str] = field(default_factory=list)
    output: str | None = None  # model folder to write; default: <run dir>/model
    device: Device = Device.auto
    precision: Precision = Precision.auto
    store: Precision = Precision.fp32  # of the written weights; later stages work with them as written
    processes: int | None = None  # None: one per core on a CPU, one otherwise
    seed: int = 0
    deterministic: bool = False
    exit_layers: list[int] | None = None  # None: 1..L-1
    min_exit_layer: int = 1
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        check_exits(self.exit_layers, self.min_exit_layer)
        check_range("seed", self.seed, 0, 2**32 - 1)
        if self.decoder_layers is not None and (self.checkpoint is None or self.stage is Stage.calibrate):
            raise ConfigError(
                "decoder_layers= cuts the model of checkpoint= before it is trained; give both, and a stage"
            )
        if self.finetune.skip_schedule.max_layers is not None and self.stage is not Stage.finetune:
            raise ConfigError(
                f"finetune.skip_schedule has no exits to train or certify, so stage={self.stage.value} cannot follow; "
                "give stage=finetune"
            )
        if self.finetune.lora.rank is not None and self.checkpoint is None and self.resume is None:
            raise ConfigError("finetune.lora adapts the weights of a trained model: give checkpoint=<model folder>")
        if self.processes is not None:
            check_range("processes", self.processes, 1, INF)
        if self.precision is Precision.fp16:
            raise ConfigError(f"precision={FP16_REFUSED}")
        if self.store not in (Precision.fp32, Precision.bf16):
            raise ConfigError(f"store must be fp32 or bf16, got {self.store.value}")


@dataclass
class CalibrateConfig:
    """python -m eval.calibrate."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: as the model was trained (its early_exit.json)
    from_log: str | None = None  # instead of a corpus: requests that a server has logged; textual consistency only
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    device: Device = Device.auto
    precision: Precision = Precision.auto
    processes: int | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.from_log is None:
            return
        if self.data is not None:
            raise ConfigError("from_log= and data= exclude each other: logged requests, or a corpus")
        if self.calibration.consistency is not Consistency.textual:
            raise ConfigError(
                "a log holds no references, so risk consistency cannot be certified from it; give "
                "calibration.consistency=textual"
            )


@dataclass
class RelabelConfig:
    """python -m eval.relabel."""

    checkpoint: str | None = None  # default: the newest model folder under runs/
    data: DataConfig | None = None  # default: as the model was trained
    output: str | None = None  # default: relabelled.jsonl in the run folder
    samples: int = 8  # of each row, beside its greedy answer
    temperature: float = 1.0
    top_p: float = 0.9
    margin: float = 0.0  # ROUGE-L by which a sample has to beat the greedy answer
    one_per_family: bool = False  # one row of each family instead of all train rows
    max_rows: int | None = None
    batch_size: int = 32
    runner: RunnerName = RunnerName.auto
    device: Device = Device.auto
    precision: Precision = Precision.auto
    processes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("samples", self.samples, 1, INF)
        check_range("temperature", self.temperature, 0, INF, open_low=True)
        check_range("top_p", self.top_p, 0, 1, open_low=True)
        check_range("margin", self.margin, 0, 1)
        check_range("batch_size", self.batch_size, 1, INF)
        if self.max_rows is not None:
            check_range("max_rows", self.max_rows, 1, INF)


@dataclass
class Table1Config:
    """python -m eval.table1."""

    checkpoint: str | None = None
    data: DataConfig | None = None
    n: int | None = None  # articles of the test split; None: one per family, all of them
    measures: list[Measure] = field(default_factory=lambda: [Measure.softmax, Measure.state, Measure.classifier])
    tolerance: float = 0.05
    consistency: Consistency = Consistency.risk
    # the measure@threshold rows; default: the papers' for model and corpus, each of which may be changed; null: no row
    given: dict[str, float | None] = field(default_factory=dict)
    given_schedule: Schedule = Schedule.decaying  # of those rows, as in the papers; auto: as certified
    oracle: bool = True
    backfill: Backfill = Backfill.project
    decoder: DecoderName = DecoderName.batch
    head: Head = Head.full
    head_k: int = 32
    runner: RunnerName = RunnerName.auto  # of decoder=engine
    weights: Weights = Weights.model
    cross_kv: Weights = Weights.model
    batch_size: int = 64
    bootstrap: int = 1000
    device: Device = Device.auto
    precision: Precision = Precision.auto
    processes: int | None = None
    seed: int = 0
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        check_range("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        if not self.measures or len(set(self.measures)) != len(self.measures):
            raise ConfigError("measures must name at least one measure, and none twice")
        for name, value in self.given.items():
            if name not in {measure.value for measure in Measure}:
                raise ConfigError(f"given.{name}: no such measure; choose from {', '.join(m.value for m in Measure)}")
            if value is not None:
                check_range(f"given.{name}", value, 0, 1)
        for key in ("batch_size", "bootstrap"):
            check_range(key, getattr(self, key), 1, INF)


@dataclass
class TrainStepConfig:
    """python -m eval.train_step."""

    shapes: list[StepShape] = field(default_factory=lambda: [StepShape.tiny, StepShape.small])
    rotate: int = 2  # of the rotating variant: the last layer and this many others
    batch_size: int | None = None  # rows; None: as the shape says
    warmup: int = 1
    repeats: int = 5
    memory: bool = True  # peak memory, on a CPU in a fresh process per variant
    device: Device = Device.auto
    precision: Precision = Precision.auto
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.shapes or len(set(self.shapes)) != len(self.shapes):
            raise ConfigError("shapes must name each of tiny, small at most once and at least one of them")
        for name in ("rotate", "repeats"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("warmup", self.warmup, 0, INF)
        if self.batch_size is not None:
            check_range("batch_size", self.batch_size, 1, INF)
        if self.precision is Precision.fp16:
            raise ConfigError(f"precision={FP16_REFUSED}")


@cache
def register() -> None:
    """Store the schemas for Hydra, once."""
    from hydra.core.config_store import ConfigStore

    from .dashboards_config import DashboardsConfig
    from .drift_config import DriftConfig, traffic_choices
    from .engine_config import EngineRulesConfig, PeersConfig, ServingConfig
    from .experiment_config import SCHEMAS
    from .import_config import ImportGgufConfig
    from .load_config import LoadConfig
    from .serve_config import ServeConfig
    from .soak_config import HttpShareConfig, SoakConfig

    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="calibrate_schema", node=CalibrateConfig)
    store.store(name="relabel_schema", node=RelabelConfig)
    store.store(name="table1_schema", node=Table1Config)
    store.store(name="train_step_schema", node=TrainStepConfig)
    store.store(name="engine_rules_schema", node=EngineRulesConfig)
    store.store(name="peers_schema", node=PeersConfig)
    for name in ("throughput", "latency"):
        store.store(name=f"{name}_schema", node=ServingConfig)
    store.store(name="serve_schema", node=ServeConfig)
    store.store(name="serving_schema", node=LoadConfig)
    store.store(name="drift_schema", node=DriftConfig)
    for name, choice in traffic_choices().items():
        store.store(group="traffic", name=name, node=choice)
    store.store(name="soak_schema", node=SoakConfig)
    store.store(name="http_share_schema", node=HttpShareConfig)
    store.store(name="dashboards_schema", node=DashboardsConfig)
    store.store(name="import_gguf_schema", node=ImportGgufConfig)
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    store.store(group="model", name="_schema", node=ModelConfig)
    store.store(group="data", name="_schema", node=DataConfig)
