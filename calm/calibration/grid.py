"""Grids of thresholds, from confidences on dev: 1.0 first, then quantiles, ever more aggressive.

A decision "does this token leave after this layer" flips at one threshold, which for a constant threshold is the
confidence itself and for a decaying one depends on the step too. Quantiles of these flip thresholds spread the grid
over the decisions that a smaller threshold changes. Ties (a confidence that saturates at 1.0 or is constant) take one
place, not many. A grid is scalar, or a path of vectors with one threshold per layer, each vector below the one before.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..config import Schedule
from ..errors import CalibrationError
from ..records import DecodeTrace

Threshold = float | tuple[float, ...]
BELOW_ONE = float(np.nextafter(np.float32(1.0), np.float32(0.0)))  # the largest threshold that still lets 1.0 exit

NUDGE = 2e-6  # far above rounding in fp32, far below what matters


def point_to_json(threshold: Threshold) -> float | list[float]:
    """As JSON has it."""
    return list(threshold) if isinstance(threshold, tuple) else threshold


def point_from_json(value: Any) -> Threshold:
    """A threshold, or the vector of one per layer, as JSON holds it."""
    return tuple(float(v) for v in value) if isinstance(value, list) else float(value)


def as_float32(value: float) -> float:
    """The nearest fp32 number, so that a comparison in fp32 and one in double decide alike."""
    return float(np.float32(value))


def flip_thresholds(
    confidences: Float[np.ndarray, "steps layers"], kind: Schedule, tau: float, length: int
) -> Float[np.ndarray, "steps layers"]:
    """The threshold at which each confidence crosses, for the schedules of calm/thresholds.py; NaN stays NaN.

    Clipped to [0, largest number below 1]: at 1.0 exits are off, so a saturated confidence flips just below. With a
    decaying schedule the value lies ``NUDGE`` below the exact one, which rounding would decide one way or the other:
    all tokens of a confidence with few values, such as agreement's, would hang on it.
    """
    decay = np.exp(-tau * np.arange(confidences.shape[0]) / length)[:, None]  # (T, 1)
    if kind is Schedule.decaying:
        flips = (confidences - 0.1 * decay) / 0.9 - NUDGE
    elif kind is Schedule.decaying_released:
        flips = confidences / (0.9 + 0.1 * decay) - NUDGE
    else:
        flips = confidences
    return np.clip(flips, 0.0, BELOW_ONE)


def collect_flips(
    traces: Sequence[DecodeTrace], exit_layers: Sequence[int], kind: Schedule, tau: float, length: int
) -> Float[np.ndarray, "tokens layers"]:
    """Flip thresholds of all tokens after the checked layers, columns in the order of ``exit_layers``.

    Raises:
        CalibrationError: a trace holds no confidences, or not one is a number.
    """
    columns = [layer - 1 for layer in exit_layers]
    parts = []
    for trace in traces:
        if len(trace.confidences) != len(trace.tokens):
            raise CalibrationError(f"trace {trace.id!r} holds no confidences: decode with record_confidences=True")
        if trace.tokens:
            rows = np.asarray(trace.confidences, dtype=np.float64)[:, columns]
            parts.append(flip_thresholds(rows, kind, tau, length))
    flips = np.concatenate(parts) if parts else np.empty((0, len(columns)))
    if not np.isfinite(flips).any():
        raise CalibrationError("no confidence was recorded on dev: the measure says nothing at any checked layer")
    return flips


def equal_depth_values(values: Float[np.ndarray, " values"], count: int) -> list[float]:
    """At most ``count`` distinct members of ``values``, descending, an equal share of the values between neighbours.

    All distinct members where there are no more than ``count``; the smallest is always the last.
    """
    distinct, counts = np.unique(values.astype(np.float32), return_counts=True)
    distinct, counts = distinct[::-1].astype(np.float64), counts[::-1]
    if len(distinct) <= count:
        return [float(value) for value in distinct]
    chosen: list[float] = []
    start = 0  # first distinct member not yet passed
    for slots in range(count, 0, -1):
        mass = np.cumsum(counts[start:])
        step = int(np.searchsorted(mass, mass[-1] / slots)) + 1
        step = min(step, len(distinct) - start - (slots - 1))  # leave a member for each slot to come
        start += step
        chosen.append(float(distinct[start - 1]))
    return chosen


def scalar_grid(flips: Float[np.ndarray, "tokens layers"], size: int) -> list[Threshold]:
    """1.0, then ``size`` distinct thresholds, descending; fewer only where dev holds fewer distinct confidences."""
    return [1.0, *equal_depth_values(flips[np.isfinite(flips)], size)]


def layer_path(
    flips: Float[np.ndarray, "tokens layers"], exit_layers: Sequence[int], num_layers: int, size: int
) -> list[Threshold]:
    """1.0, then at most ``size`` vectors (one threshold per layer 1..L-1): at level q each layer's own q-quantile.

    A layer that is not checked, or of which the measure says nothing, keeps 1.0.
    """
    path: list[Threshold] = [1.0]
    columns = [np.sort(column[np.isfinite(column)]) for column in flips.T]
    for k in range(size - 1, -1, -1):
        vector = [1.0] * (num_layers - 1)
        for layer, column in zip(exit_layers, columns, strict=True):
            if column.size:
                vector[layer - 1] = as_float32(column[math.floor(k / size * column.size)])
        if tuple(vector) != path[-1]:
            path.append(tuple(vector))
    return path


def check_grid(grid: Sequence[Threshold]) -> None:
    """CalibrationError unless the grid is 1.0 followed by distinct, ever more aggressive thresholds in [0, 1)."""
    if not grid or grid[0] != 1.0:
        raise CalibrationError(f"a grid starts with 1.0 (full depth), got {list(grid)[:3]}")
    sizes = {len(point) for point in grid[1:] if isinstance(point, tuple)}
    if len(sizes) > 1 or (sizes and not all(isinstance(point, tuple) for point in grid[1:])):
        raise CalibrationError("a grid holds numbers, or vectors of one length, not a mixture")
    width = sizes.pop() if sizes else 1
    above = np.ones(width)
    for point in grid[1:]:
        values = np.atleast_1d(np.asarray(point, dtype=np.float64))
        if not ((values >= 0.0) & (values <= 1.0)).all():
            raise CalibrationError(f"a threshold must lie in [0, 1], got {point}")
        if not (values <= above).all() or (values == above).all():
            raise CalibrationError(f"a grid must descend without repeats, got {point} after {tuple(above.tolist())}")
        above = values
