"""What the settings of programs that let ways of decoding take turns have in common."""

from typing import Protocol, runtime_checkable

from ..config import INF, BatchRule, Measure, check_once_each, check_range
from ..engine_config import SERVED_DTYPES, check_choice


@runtime_checkable  # argument checks in tests ask isinstance
class Rounds(Protocol):
    """Batch sizes, and how often every way of one takes its turn."""

    batches: list[int]
    repeats: int
    warmups: int
    attempts: int
    threads: int
    seed: int


def check_rounds(config: Rounds) -> None:
    """Raise ConfigError for what is out of range."""
    check_once_each("batches", config.batches)
    for rows in config.batches:
        check_range("batches", rows, 1, INF)
    for name in ("repeats", "attempts", "threads"):
        check_range(name, getattr(config, name), 1, INF)
    check_range("warmups", config.warmups, 0, INF)
    check_range("seed", config.seed, 0, 2**32 - 1)


@runtime_checkable
class TimedAnswers(Rounds, Protocol):
    """Answers of ways by a row-exact rule, decoded for their quality, and some of them timed to their ends."""

    n: int | None
    timed: int
    measures: list[Measure]
    tolerance: float
    rule: BatchRule
    dtype: str | None
    batch_size: int
    bootstrap: int


def check_timed_answers(config: TimedAnswers) -> None:
    """Raise ConfigError for what is out of range, or none of the choices."""
    if config.dtype is not None:
        check_choice("dtype", config.dtype, SERVED_DTYPES)
    check_choice("rule", config.rule.value, ("own", "compact", "rebatch"))
    check_rounds(config)
    check_once_each("measures", config.measures)
    if config.n is not None:
        check_range("n", config.n, 2, INF)
    check_range("timed", config.timed, 2, INF)
    check_range("tolerance", config.tolerance, 0, 1, open_low=True, open_high=True)
    for name in ("batch_size", "bootstrap"):
        check_range(name, getattr(config, name), 1, INF)
