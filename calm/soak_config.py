"""Settings of the programs that start a server of ours and measure it (python -m eval.soak, eval.http_share)."""

from dataclasses import dataclass, field

from .config import INF, DataConfig, check_once_each, check_range
from .engine_config import SERVED_DTYPES, SERVED_SHAPES, check_choice
from .errors import ConfigError


@dataclass
class SoakConfig:
    """python -m eval.soak."""

    checkpoint: str | None = None  # default: the newest model under runs/
    data: DataConfig | None = None  # its test split is what is asked; default: what the model was trained on
    prompts: int = 64  # articles of it
    ways: list[str] = field(default_factory=lambda: ["full", "threshold=0.9"])  # of decoding, in turn
    serve: list[str] = field(default_factory=list)  # settings of the server, such as max_batch=8

    duration_s: float = 1800.0
    rate: float = 20.0  # clients a second, on average
    burst: int = 64  # requests that come at once
    burst_every_s: float = 30.0
    sample_every_s: float = 5.0
    settle_s: float = 60.0  # of the duration, at its beginning: memory is compared from there on
    growth_mib_per_hour: float = 64.0  # of resident memory that is no leak yet
    timeout: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        from .load_config import early_exit

        for name in ("prompts", "burst"):
            check_range(name, getattr(self, name), 1, INF)
        for name in ("duration_s", "rate", "burst_every_s", "sample_every_s", "timeout"):
            check_range(name, getattr(self, name), 0, INF, open_low=True, open_high=True)
        check_range("settle_s", self.settle_s, 0, self.duration_s, open_high=True)
        check_range("growth_mib_per_hour", self.growth_mib_per_hour, 0, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
        if not self.ways:
            raise ConfigError("ways needs at least one entry")
        for way in self.ways:
            early_exit(way)


@dataclass
class HttpShareConfig:
    """python -m eval.http_share."""

    checkpoint: str | None = None  # a trained model; default: random weights in each of ``shapes``
    shapes: list[str] = field(default_factory=lambda: ["tiny", "small"])
    batches: list[int] = field(default_factory=lambda: [8, 32])
    dtype: str = "fp32"
    source_tokens: int = 128
    tokens: int = 64  # of each answer
    waves: int = 4  # requests of a turn, in full batches; at least
    turn_s: float = 0.5  # of a direct call's turn, at least: a fast model is asked more
    queued: float = 2.0  # requests in flight over HTTP, in full batches: a batch that runs and what is to follow it
    ways: list[str] = field(default_factory=lambda: ["full", "static=2"])
    repeats: int = 7
    warmups: int = 1
    allow_noisy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        from .load_config import early_exit

        for name in ("shapes", "batches", "ways"):
            check_once_each(name, getattr(self, name))
        for shape in self.shapes:
            check_choice("shapes", shape, SERVED_SHAPES)
        check_choice("dtype", self.dtype, SERVED_DTYPES)
        for way in self.ways:
            early_exit(way)
        for rows in self.batches:
            check_range("batches", rows, 1, INF)
        check_range("source_tokens", self.source_tokens, 2, 512)
        check_range("tokens", self.tokens, 2, 128)
        for name in ("waves", "repeats"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("turn_s", self.turn_s, 0, 3600)
        check_range("queued", self.queued, 1, INF, open_high=True)
        check_range("warmups", self.warmups, 0, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
