"""How an engine runs, and what one request asks for: plain dataclasses with their ranges."""

from dataclasses import dataclass, field

from calm.config import INF, BatchRule, Consistency, Head, check_range
from calm.errors import ConfigError
from calm.policies import Policy

MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True)
class EngineOptions:
    """Settings of one engine.

    Attributes:
        rule: batch rule; ``auto`` picks own, compact or rebatch by measured cost.
        quantile: share of rows that ends a step under rule=quantile.
        company, max_age: of rule=rebatch; company 0 lets the cost table decide.
        max_batch: rows that decode at once; their K/V is reserved up front.
        buckets: batch sizes that a step is run at, ascending; empty: powers of two up to ``max_batch``.
        max_waiting: requests that may wait; more are refused.
        prefill_rows: rows of one encoder call, always padded to this number so that no mate changes a bit.
        prefill_calls: encoder calls between two decode steps at most: decoding rows never starve.
        source_multiple: sources are padded to multiples of this many tokens.
        cross_cache_rows: sources whose cross K/V is kept for when they come again; 0 keeps none.
        head: full, candidates (the first check's top ``head_k``) or screened (int8, ``head_k`` rescored exactly).
        record_confidences: keep them in the traces.
        poison: fill what is freed with NaN, so that a stale read shows (tests).
    """

    rule: BatchRule = BatchRule.own
    quantile: float = 0.9
    company: int = 0
    max_age: int = 8
    max_batch: int = 32
    buckets: tuple[int, ...] = ()
    max_waiting: int = 1024
    prefill_rows: int = 4
    prefill_calls: int = 2
    source_multiple: int = 16
    cross_cache_rows: int = 64
    head: Head = Head.full
    head_k: int = 32
    record_confidences: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("max_age", "max_batch", "max_waiting", "prefill_rows", "prefill_calls", "source_multiple"):
            check_range(name, getattr(self, name), 1, INF)
        check_range("quantile", self.quantile, 0, 1, open_low=True)
        check_range("company", self.company, 0, INF)
        check_range("cross_cache_rows", self.cross_cache_rows, 0, INF)
        check_range("head_k", self.head_k, 2, INF)
        if self.buckets and (list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1):
            raise ConfigError(f"buckets must be ascending positive numbers, got {list(self.buckets)}")
        if self.buckets and self.buckets[-1] != self.max_batch:
            raise ConfigError(f"the last bucket must be max_batch={self.max_batch}, got {self.buckets[-1]}")

    @property
    def ladder(self) -> tuple[int, ...]:
        """The buckets: as given, else powers of two below ``max_batch``, and ``max_batch``."""
        if self.buckets:
            return self.buckets
        powers = [1 << n for n in range(self.max_batch.bit_length()) if 1 << n < self.max_batch]
        return (*powers, self.max_batch)


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for.

    How deep its tokens go is said by at most one of ``policy``, ``threshold`` and ``tolerance``; without any it
    decodes at full depth.

    Attributes:
        policy: full, static, confident, replay.
        threshold: of ``measure`` (default: the one that the calibration picked), on its calibrated schedule.
        tolerance: the threshold certified for this tolerance.
        consistency: which certificate ``tolerance`` means.
        max_tokens, min_tokens: of the answer, EOS included; max_tokens above N is refused.
        temperature: 0 is greedy.
        top_p: share of probability that sampling draws from.
        seed: of sampling; the same seed gives the same draws whoever the mates are. None: the request's own number.
        stop: strings that end the answer and are not part of it.
        stop_ids: token ids that end the answer, and are kept in it.
        ignore_eos: go on to max_tokens whatever is emitted (for benchmarks).
    """

    policy: Policy | None = None
    threshold: float | None = None
    tolerance: float | None = None
    measure: str | None = None
    consistency: Consistency = Consistency.risk
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        asked = [name for name in ("policy", "threshold", "tolerance") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} exclude each other: give one of them")
        if self.threshold is not None:
            check_range("threshold", self.threshold, 0, 1)
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 1, INF)
        check_range("min_tokens", self.min_tokens, 0, INF)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        check_range("temperature", self.temperature, 0, INF, open_high=True)
        check_range("top_p", self.top_p, 0, 1, open_low=True)
        if len(self.stop) > MAX_STOPS:
            raise ConfigError(f"at most {MAX_STOPS} stop strings, got {len(self.stop)}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ConfigError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Nothing but EOS or N ends the answer and nothing but the argmax makes it: what a certificate speaks of."""
        return (
            self.greedy
            and self.max_tokens is None
            and self.min_tokens == 0
            and not self.stop
            and not self.stop_ids
            and not self.ignore_eos
        )
