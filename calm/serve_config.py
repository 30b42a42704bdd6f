"""Settings of the HTTP server (python -m serve); values in ``conf/serve.yaml``."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from .config import (
    INF,
    BatchRule,
    Consistency,
    Device,
    Head,
    Measure,
    OnDrift,
    Preempt,
    RunnerName,
    Weights,
    check_range,
)
from .drafting import Draft
from .engine_config import SERVED_DTYPES, check_choice
from .errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
KEEP_ALIVE_S = 15  # clients keep idle connections for so long; a server that closes earlier resets their next request


@dataclass
class ServeLimits:
    """What one call, and all clients together, may ask for."""

    max_prompts_per_call: int = 64
    max_n: int = 16
    max_stops: int = 16
    connections: int = 512

    def __post_init__(self) -> None:
        for name in ("max_prompts_per_call", "max_n", "connections"):
            check_range(f"limits.{name}", getattr(self, name), 1, INF)
        check_range("limits.max_stops", self.max_stops, 0, 16)  # the engine takes no more


@dataclass
class DraftConfig:
    """How requests draft that say nothing of early exit (calm.drafting); without a layer they do not."""

    layer: int | None = None
    length: int = 4
    measure: Measure | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        self.draft()

    def draft(self) -> Draft | None:
        """Raise ConfigError for numbers out of range."""
        if self.layer is None:
            if (self.length, self.measure, self.threshold) != (4, None, 0.0):
                raise ConfigError("default_draft: its other settings need default_draft.layer")
            return None
        return Draft(self.layer, self.length, self.measure, self.threshold)


@dataclass
class ServeConfig:
    """python -m serve. The API key stands in none of these: it comes from CALM_API_KEY or from ``api_key_file``."""

    checkpoint: str | None = None  # a model folder; without one the program says so
    name: str | None = None  # of the model, for clients; default: by the checkpoint's folder
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    allowed_hosts: list[str] = field(default_factory=list)  # names in Host headers, besides loopback and ``host``
    api_key_file: str | None = None

    # the engine
    rule: BatchRule = BatchRule.own
    max_batch: int = 32
    max_waiting: int = 1024
    dtype: str = "fp32"  # fp32, bf16, or int8 weights (native runner; what is not weights in bf16)
    head: Head = Head.full
    head_k: int = 32
    runner: RunnerName = RunnerName.auto
    cross_kv: Weights = Weights.model
    block_size: int = 16  # positions of one layer in a block of a decoder-only model's cache
    cache_blocks: int | None = None  # of all layers together; None: enough for max_batch rows at full length and depth
    preempt: Preempt = Preempt.swap  # how a row comes back whose blocks older ones needed
    device: Device = Device.auto
    restarts: int = 3  # of an engine that died; then the server leaves
    hung_after_s: float = 2.0  # without a word from an engine until it counts as hung and is replaced

    # requests
    default_tolerance: float | None = None  # of a request that says nothing of early exit; None: full depth
    default_consistency: Consistency = Consistency.risk
    default_draft: DraftConfig = field(default_factory=DraftConfig)  # full depth, several tokens at a time
    request_timeout_s: float = 60.0
    max_body_bytes: int = 2**20
    max_prompt_bytes: int = 2**17  # of one text, as UTF-8; longer ones are refused before they are tokenised
    limits: ServeLimits = field(default_factory=ServeLimits)

    # connections
    head_timeout_s: float = 10.0  # for a request's line and headers
    body_timeout_s: float = 30.0  # for its body
    keep_alive_s: int = 75  # of an idle connection
    drain_s: float = 30.0  # for requests in flight after SIGTERM

    log_prompts: bool = False

    # where certified answers are no longer as deep as at calibration
    on_drift: OnDrift = OnDrift.warn
    requests_per_alarm: float = 100_000.0  # answers of unchanged traffic that a false alarm takes, at least, on average

    def __post_init__(self) -> None:
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ConfigError("name: letters, digits, '.', '_' and '-', at most 64, the first a letter or digit")
        for host in (self.host, *self.allowed_hosts):
            if not HOST.fullmatch(host):
                raise ConfigError(f"{host!r} is no host name or address; give a name without scheme and port")
        check_choice("dtype", self.dtype, SERVED_DTYPES)
        check_range("port", self.port, 0, 65535)
        for name in ("block_size", "max_batch", "max_waiting", "max_body_bytes", "max_prompt_bytes"):
            check_range(name, getattr(self, name), 1, INF)
        if self.cache_blocks is not None:
            check_range("cache_blocks", self.cache_blocks, 1, INF)
        check_range("requests_per_alarm", self.requests_per_alarm, 1, INF)
        check_range("head_k", self.head_k, 2, INF)
        check_range("restarts", self.restarts, 0, INF)
        if self.default_tolerance is not None:
            check_range("default_tolerance", self.default_tolerance, 0, 1, open_low=True, open_high=True)
            if self.default_draft.layer is not None:
                raise ConfigError("default_tolerance and default_draft exclude each other: drafts are of full depth")
        for name in ("request_timeout_s", "head_timeout_s", "body_timeout_s", "hung_after_s"):
            check_range(name, getattr(self, name), 0, INF, open_low=True, open_high=True)
        check_range("drain_s", self.drain_s, 0, INF, open_high=True)
        check_range("keep_alive_s", self.keep_alive_s, KEEP_ALIVE_S, INF, open_low=True)


def served_name(config: ServeConfig) -> str:
    """What clients call the model: as asked, else its folder's name, or that of the folder around a plain ``model``."""
    if config.name is not None:
        return config.name
    folder = Path(config.checkpoint or "").resolve()
    name = folder.parent.name if folder.name == "model" else folder.name
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:64]
    return cleaned or "model"
