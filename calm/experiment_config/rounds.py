"""What the settings of programs that let ways of decoding take turns have in common."""

from typing import Protocol, runtime_checkable

from ..config import INF, check_once_each, check_range


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
