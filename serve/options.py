"""How an engine runs, and what one request asks for: plain dataclasses with their ranges."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, cast

from calm.config import (
    INF,
    PREFILL_ROWS,
    SOURCE_MULTIPLE,
    BatchRule,
    Consistency,
    Head,
    OnDrift,
    Preempt,
    RunnerName,
    Stepping,
    Weights,
    check_range,
)
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.policies import Policy

MAX_STOPS = 16
MOST_BLOCK = 1 << 16  # positions
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MIN_CALLS = 2  # of the encoder between two steps, where nobody says otherwise
Choice = TypeVar("Choice", bound=Enum)


def _whole(name: str, value: Any) -> None:
    """Raise ConfigError unless it is a whole number of at most 64 bits (longer ones cannot even be printed)."""
    if type(value) is not int:
        raise ConfigError(f"{name} must be a whole number, got {value!r:.40}")
    if value.bit_length() > 64:
        raise ConfigError(f"{name} is a number of {value.bit_length()} bits; give one of at most 64")


def _number(name: str, value: Any) -> None:
    """Raise ConfigError unless it is a whole number or a float, which may be NaN: its range says so."""
    if type(value) is int:
        _whole(name, value)
    elif not isinstance(value, float):
        raise ConfigError(f"{name} must be a number, got {value!r:.40}")


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, got {value!r:.40}")


def _choice(name: str, kind: type[Choice], value: Any) -> Choice:
    """The member of an enum, given as such or by its value."""
    try:
        return kind(value)
    except ValueError:
        there = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name}={value!r:.40} is none; choose from {there}") from None


@dataclass(frozen=True)
class EngineOptions:
    """Settings of one engine.

    Attributes:
        rule: batch rule; ``auto`` picks own, compact or rebatch by measured cost.
        quantile: share of rows that ends a step under rule=quantile.
        company, max_age: of rule=rebatch; company 0 lets the cost table decide.
        max_batch: rows that decode at once; their K/V is reserved up front.
        buckets: batch sizes that an eager step is run at, and that a cost table is measured at, ascending; empty:
            powers of two up to ``max_batch``.
        max_waiting: requests that may wait; more are refused.
        prefill_rows: rows of one encoder call, always padded to this number so that no mate changes a bit; prompts of a
            decoder-only model that are read, one by one, in its place.
        prefill_calls: encoder calls between two decode steps at most: decoding rows never starve.
        source_multiple: sources are padded to multiples of this many tokens.
        cross_cache_rows: sources whose cross K/V (of a decoder-only model the prompt's own) is kept for when they come
            again; 0 keeps none.
        cross_cache_bytes: of all of them; None: as many as they are, of prompts as many as the cache's blocks have.
        block_size: positions of one layer in a block of a decoder-only model's cache.
        cache_blocks: blocks of that cache, for all layers together; None: enough for ``max_batch`` rows at full length
            and depth. Where they run out, the newest row gives its own up and comes back later, its answer unchanged.
        preempt: how it comes back: its K/V copied to the host and back (swap), or made anew as it was (replay).
        head: full, candidates (the first check's top ``head_k``) or screened (int8, ``head_k`` rescored exactly).
        runner: native (compiled for this CPU), eager (plain torch), graph (the whole step on a GPU), or auto: graph on
            a GPU, native where it can be had.
        stepping: of the graph runner: how a step ends early.
        overlap: of the graph runner: a step is sent before the words of the one before are read;
            None: on a GPU.
        weights: of the model as it was loaded, or int8 (native runner only).
        cross_kv: cross-attention K/V in the dtype of the layers' caches, or int8 (native and graph runners).
        record_confidences: keep them in the traces.
        poison: fill what is freed with NaN, so that a stale read shows (tests).
        on_drift, requests_per_alarm, drift_patience: what is done where certified answers are no longer as deep as at
            calibration, see drift.Drift.
    """

    rule: BatchRule = BatchRule.own
    quantile: float = 0.5
    company: int = 0
    max_age: int = 8
    max_batch: int = 32
    buckets: tuple[int, ...] = ()
    max_waiting: int = 1024
    prefill_rows: int = PREFILL_ROWS
    prefill_calls: int = MIN_CALLS
    source_multiple: int = SOURCE_MULTIPLE
    cross_cache_rows: int = 64
    cross_cache_bytes: int | None = None
    block_size: int = 16
    cache_blocks: int | None = None
    preempt: Preempt = Preempt.swap
    head: Head = Head.full
    head_k: int = 32
    runner: RunnerName = RunnerName.auto
    stepping: Stepping = Stepping.whole
    overlap: bool | None = None
    weights: Weights = Weights.model
    cross_kv: Weights = Weights.model
    record_confidences: bool = False
    poison: bool = False
    on_drift: OnDrift = OnDrift.warn
    requests_per_alarm: float = 100_000.0
    drift_patience: int = 1_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", _choice("rule", BatchRule, self.rule))
        object.__setattr__(self, "head", _choice("head", Head, self.head))
        object.__setattr__(self, "runner", _choice("runner", RunnerName, self.runner))
        object.__setattr__(self, "stepping", _choice("stepping", Stepping, self.stepping))
        object.__setattr__(self, "preempt", _choice("preempt", Preempt, self.preempt))
        object.__setattr__(self, "on_drift", _choice("on_drift", OnDrift, self.on_drift))
        for name in ("weights", "cross_kv"):
            object.__setattr__(self, name, _choice(name, Weights, getattr(self, name)))
        if self.overlap is not None:
            _flag("overlap", self.overlap)
        least = {"company": 0, "cross_cache_rows": 0, "head_k": 2}
        _number("requests_per_alarm", self.requests_per_alarm)
        check_range("requests_per_alarm", self.requests_per_alarm, 1, INF)
        for name in (
            "block_size",
            "drift_patience",
            "max_age",
            "max_batch",
            "max_waiting",
            "prefill_rows",
            "prefill_calls",
            "source_multiple",
            *least,
        ):
            _whole(name, getattr(self, name))
            check_range(name, getattr(self, name), least.get(name, 1), INF)
        check_range("block_size", self.block_size, 1, MOST_BLOCK)
        if self.cross_cache_bytes is not None:
            _whole("cross_cache_bytes", self.cross_cache_bytes)
            check_range("cross_cache_bytes", self.cross_cache_bytes, 0, INF)
        if self.cache_blocks is not None:
            _whole("cache_blocks", self.cache_blocks)
            check_range("cache_blocks", self.cache_blocks, 1, INF)
        _number("quantile", self.quantile)
        check_range("quantile", self.quantile, 0, 1, open_low=True)
        for size in self.buckets:
            _whole("a bucket", size)
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


def at_once(batch: int, prefill_rows: int = PREFILL_ROWS) -> dict[str, Any]:
    """Options of an engine that is timed: it takes a batch's rows up before its first step and encodes each anew.

    ``prefill_rows``: of one encoder call, at most.
    """
    rows = min(batch, prefill_rows)
    calls = max(MIN_CALLS, -(-batch // rows))
    return {"max_batch": batch, "prefill_rows": rows, "prefill_calls": calls, "cross_cache_rows": 0}


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for.

    How deep its tokens go is said by at most one of ``policy``, ``threshold``, ``tolerance`` and ``draft``; without any
    it decodes at full depth, or by the schedule of layers that the model was trained by.

    Attributes:
        policy: full, static, confident, replay, skip_schedule.
        threshold: of ``measure`` (default: the one that the calibration picked), on its calibrated schedule.
        tolerance: the threshold certified for this tolerance.
        consistency: which certificate ``tolerance`` means.
        draft: decode at full depth, several tokens at a time: the first layers draft, the others verify.
        max_tokens, min_tokens: of the answer, EOS included; max_tokens above N is refused.
        temperature: 0 is greedy.
        top_p: share of probability that sampling draws from.
        seed: of sampling; the same seed gives the same draws whoever the mates are. None: the request's own number.
        stop: strings that end the answer and are not part of it.
        stop_ids: token ids that end the answer, and are kept in it.
        ignore_eos: go on to max_tokens whatever is emitted (for benchmarks).
        truncate: cut a text that is longer than the model takes; False refuses it.
    """

    policy: Policy | None = None
    threshold: float | None = None
    tolerance: float | None = None
    measure: str | None = None
    consistency: Consistency = Consistency.risk
    draft: Draft | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    truncate: bool = True

    def __post_init__(self) -> None:
        asked = [name for name in ("draft", "policy", "threshold", "tolerance") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} exclude each other: give one of them")
        if self.draft is not None and not isinstance(self.draft, Draft):
            raise ConfigError(f"draft must be a calm.drafting.Draft, got {self.draft!r:.40}")
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be one of calm.policies, got {self.policy!r:.40}")
        object.__setattr__(self, "consistency", _choice("consistency", Consistency, self.consistency))
        for name in ("threshold", "tolerance"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name))
                check_range(name, getattr(self, name), 0, 1)
        self._check_tokens()
        for name in ("temperature", "top_p"):
            _number(name, getattr(self, name))
        check_range("temperature", self.temperature, 0, INF, open_high=True)
        check_range("top_p", self.top_p, 0, 1, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed)
        if self.draft is not None and (self.temperature or self.min_tokens):
            raise ConfigError("draft verifies greedy words: give temperature=0 and min_tokens=0, or leave draft out")
        _flag("ignore_eos", self.ignore_eos)
        _flag("truncate", self.truncate)
        self._check_stops()

    def _check_tokens(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens)
            check_range("max_tokens", self.max_tokens, 1, INF)
        _whole("min_tokens", self.min_tokens)
        check_range("min_tokens", self.min_tokens, 0, INF)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    def _check_stops(self) -> None:
        stop, stop_ids = cast(Any, self.stop), cast(Any, self.stop_ids)
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            raise ConfigError(f"stop must be a list of strings, got {stop!r:.40}")
        if len(self.stop) > MAX_STOPS:
            raise ConfigError(f"at most {MAX_STOPS} stop strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str):
                raise ConfigError(f"a stop string must be a string, got {text!r:.40}")
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ConfigError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
        if isinstance(stop_ids, str) or not isinstance(stop_ids, Set | Sequence):
            raise ConfigError(f"stop_ids must be a set of token ids, got {stop_ids!r:.40}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ConfigError(f"at most {MAX_STOP_IDS} stop ids, got {len(self.stop_ids)}")
        for token in self.stop_ids:
            _whole("a stop id", token)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Nothing but EOS or the length ends the answer and nothing but the argmax makes it."""
        return self.greedy and self.min_tokens == 0 and not self.stop and not self.stop_ids and not self.ignore_eos
