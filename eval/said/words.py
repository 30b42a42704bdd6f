"""Numbers with their intervals as sentences have them."""

from collections.abc import Mapping, Sequence
from typing import Any

BUSY = "The machine did other work while this was timed: the record is marked as noisy."


def told(row: Mapping[str, Any], name: str, digits: int = 2, scale: float = 1.0) -> str:
    """``2.33 [2.24, 2.49]`` of a row with ``name``, ``name_low`` and ``name_high``; the mean alone without them."""
    return interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high"), digits, scale)


def interval(middle: float, low: float | None, high: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """The same of three numbers."""
    if low is None or high is None:
        return number(middle, digits, scale)
    return f"{number(middle, digits, scale)} [{number(low, digits, scale)}, {number(high, digits, scale)}]"


def number(value: float, digits: int = 2, scale: float = 1.0) -> str:
    """Without a minus before what rounds to nothing."""
    shown = f"{value * scale:.{digits}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown


def sign(row: Mapping[str, Any], name: str) -> int:
    """Of a difference: 1 or -1 where its interval leaves 0 out, else 0."""
    return int(row[f"{name}_low"] > 0) - int(row[f"{name}_high"] < 0)


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))


def shown_threshold(value: float | Sequence[float] | None) -> str:
    """One, or one a layer."""
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float | int) else "/".join(f"{each:.3g}" for each in value)
