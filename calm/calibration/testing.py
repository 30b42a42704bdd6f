"""Fixed-sequence testing: which hypotheses fall when they are tried one after the other, in an order fixed beforehand.

Each is tested at the whole ``error_prob``; the first that does not fall ends the sequence, and nothing after it is
certified, however small its p-value. The family-wise error is then at most ``error_prob`` for any dependence between
the p-values, because an error needs the first true hypothesis to fall. Three ways to lose that guarantee: to go on
after a failure, to order by the data, to take the first passing member from the aggressive end. Pure functions.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import check_range
from ..errors import CalibrationError

Point = TypeVar("Point")


def fixed_sequence(p_values: Sequence[Any] | NDArray[Any], error_prob: float) -> NDArray[np.bool_]:
    """True for the leading p-values that are all <= ``error_prob``; the last axis is the order of testing.

    Raises:
        CalibrationError: a p-value is NaN or outside [0, 1].
        ConfigError: ``error_prob`` lies outside (0, 1).
    """
    check_range("error_prob", error_prob, 0, 1, open_low=True, open_high=True)
    values: NDArray[Any] = np.asarray(p_values, dtype=np.float64)
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise CalibrationError(f"p-values must lie in [0, 1], got {values[~((values >= 0) & (values <= 1))][:3]}")
    return np.logical_and.accumulate(values <= error_prob, axis=-1)


def certified_points(points: Sequence[Point], p_values: Sequence[float], error_prob: float) -> list[Point]:
    """The certified prefix of ``points``: whole, in the order of testing. Its last member is the most aggressive.

    ``p_values`` may be shorter than ``points``: what was not tested is not certified.
    """
    if len(p_values) > len(points):
        raise CalibrationError(f"{len(p_values)} p-values for {len(points)} thresholds")
    passed = fixed_sequence(np.asarray(p_values, dtype=np.float64), error_prob)
    return [point for point, ok in zip(points, passed, strict=False) if ok]
