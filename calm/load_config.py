"""Settings of the load client (python -m eval.serving), and what its words for rates and ways of decoding mean."""

import math
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .config import INF, DataConfig, check_once_each, check_range
from .errors import ConfigError

WAYS = "plain, full, static=LAYER, tolerance=X, threshold=X"
PLAIN = "plain"
SLOS = ("ttft", "tpot", "e2el")
OWN_FIELDS = ("model", "prompt", "stream", "stream_options", "early_exit", "max_tokens", "temperature", "ignore_eos")


@dataclass(frozen=True)
class Endpoint:
    """Where a server is.

    Attributes:
        base: what stands before ``/v1`` in every path; mostly empty.
    """

    secure: bool
    host: str
    port: int
    base: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def endpoint(url: str) -> Endpoint:
    """A server's address; ``/v1`` and ``/v1/completions`` may stand at its end. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url={url} cannot be read ({error}); write it like http://127.0.0.1:8000") from None
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not plain:
        raise ConfigError(f"url={url} is no server's address; write it like http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("url= holds a user or password; the key comes from CALM_API_KEY")
    base = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
    secure = parts.scheme == "https"
    return Endpoint(secure, host, port or (443 if secure else 80), base)


def early_exit(way: str) -> dict[str, Any] | None:
    """A way's ``early_exit`` field; None for ``plain``, which sends none. Raises ConfigError for what is no way."""
    name, equals, value = way.partition("=")
    if not equals and name == PLAIN:
        return None
    if not equals and name == "full":
        return {"policy": "full"}
    try:
        if name == "static" and equals:
            check_range(f"ways: {way}", int(value), 1, INF)
            return {"policy": "static", "layer": int(value)}
        if name in ("tolerance", "threshold") and equals:
            check_range(f"ways: {way}", float(value), 0, 1)
            return {name: float(value)}
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"ways: {way!r} needs a number after its '='") from None
    raise ConfigError(f"ways: {way!r} is none; choose from {WAYS}")


def told_rate(rate: float) -> float | str:
    """A rate as JSON can hold it: ``inf`` in words."""
    return rate if math.isfinite(rate) else "inf"


@dataclass
class LoadConfig:
    """python -m eval.serving. The API key stands in none of these: it comes from CALM_API_KEY.

    Prompts come from one of ``prompts``, ``random_tokens`` and ``data``; without any, from the corpus of the model
    folder (``checkpoint``, else the newest under runs/).
    """

    url: str = "http://127.0.0.1:8000"
    served_model: str | None = None  # as the server calls it; default: the first that it lists
    rates: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])  # requests a second; inf: all at once
    ways: list[str] = field(default_factory=lambda: [PLAIN])  # of decoding; all but plain need a server of ours
    n: int = 200  # requests of each rate and way
    burstiness: float = 1.0  # shape of the gamma gaps: 1 is Poisson, below comes in bursts, inf is a metronome

    checkpoint: str | None = None
    data: DataConfig | None = None  # its test split
    prompts: str | None = None  # a text file, one prompt a line, or .jsonl with prompt_field in each row
    prompt_field: str = "prompt"
    random_tokens: int | None = None  # ids drawn evenly, this many a prompt
    vocab_size: int = 32128  # of random ids
    eos_id: int | None = 1  # that ends random ids; null: nothing does
    as_ids: bool = False  # send token ids, cut to the model folder's longest source, instead of texts

    max_tokens: int | None = None  # null: the server's own
    ignore_eos: bool = False  # go on to max_tokens (ours and vLLM)
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of every request, such as truncate

    warmups: int = 4  # at once, before each rate and way; they do not count
    goodput: dict[str, float] = field(default_factory=dict)  # limits in ms: ttft, tpot, e2el
    percentiles: list[float] = field(default_factory=lambda: [50.0, 90.0, 95.0, 99.0])
    timeout: float = 600.0  # seconds from sending to the answer's end
    ready_timeout: float = 60.0  # seconds that the server may take until it answers at all
    seed: int = 0  # of arrivals and random ids

    def __post_init__(self) -> None:
        endpoint(self.url)
        for name in ("rates", "ways", "percentiles"):
            check_once_each(name, getattr(self, name))
        for rate in self.rates:
            check_range("rates", rate, 0, INF, open_low=True)
        for way in self.ways:
            early_exit(way)
        for name in ("n", "random_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, INF)
        check_range("burstiness", self.burstiness, 0, INF, open_low=True)
        check_range("vocab_size", self.vocab_size, 4, INF)
        check_range("temperature", self.temperature, 0, INF, open_high=True)
        check_range("warmups", self.warmups, 0, INF)
        check_range("seed", self.seed, 0, 2**32 - 1)
        for percentile in self.percentiles:
            check_range("percentiles", percentile, 0, 100)
        for name in ("timeout", "ready_timeout"):
            check_range(name, getattr(self, name), 0, INF, open_low=True, open_high=True)
        self._check_bodies()

    def _check_bodies(self) -> None:
        for name, limit in self.goodput.items():
            if name not in SLOS:
                raise ConfigError(f"goodput.{name}: no such limit; choose from {', '.join(SLOS)}")
            check_range(f"goodput.{name}", limit, 0, INF)
        asked = {"prompts": self.prompts, "random_tokens": self.random_tokens, "data": self.data}
        given = [name for name, value in asked.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(f'{name}=' for name in given)} exclude each other: one source of prompts")
        if self.ignore_eos and self.max_tokens is None:
            raise ConfigError("ignore_eos=true needs max_tokens=, or nothing ends the answers")
        own = [name for name in self.extra_body if name in OWN_FIELDS]
        if own:
            raise ConfigError(f"extra_body.{own[0]}: this field has a setting of its own")
