"""Which rows a more aggressive threshold leaves as they are, read off the trace at the threshold before.

As long as no decision of a row changes, its tokens, hence its caches, hence its confidences stay what they are. So a
row need not be decoded again when, at every token, the first checked layer whose recorded confidence reaches the new
threshold is the layer at which the row crossed before.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..records import DecodeTrace
from ..thresholds import ThresholdSchedule

MARGIN = 1e-6  # a confidence this close to its threshold counts as changed: the row is decoded, not guessed


def row_unchanged(trace: DecodeTrace, schedule: ThresholdSchedule, exit_layers: Sequence[int], num_layers: int) -> bool:
    """True when decoding with ``schedule`` is sure to give ``trace`` again.

    ``trace.confidences[step][layer - 1]`` must hold the measure's confidence at every checked layer up to the
    crossing, NaN where the measure has none. Without recorded confidences the answer is False, and so it is where
    they are NaN throughout: a decode at full depth asks no measure, so its NaNs say nothing of one.
    """
    if len(trace.confidences) != len(trace.tokens):
        return False
    if not trace.tokens:
        return True
    confidences = np.asarray(trace.confidences, dtype=np.float64)  # (T, L)
    for step, crossing in enumerate(trace.crossing_layers):
        if _crossing(confidences[step], schedule, step, exit_layers, num_layers, crossing) != crossing:
            return False
    return True


def _crossing(
    confidences: NDArray[np.float64],
    schedule: ThresholdSchedule,
    step: int,
    exit_layers: Sequence[int],
    num_layers: int,
    known: int,
) -> int | None:
    """First checked layer up to ``known`` that crosses, L where none does and all are known, None where unsure."""
    heard = False
    for layer in exit_layers:
        if layer > known:
            return None  # it crossed there before and would not now: what follows was never seen
        base = schedule.threshold[layer - 1] if isinstance(schedule.threshold, tuple) else schedule.threshold
        confidence = confidences[layer - 1]
        heard |= not np.isnan(confidence)
        if base >= 1.0 or np.isnan(confidence):
            continue
        distance = confidence - schedule.at(step, layer)
        if abs(distance) < MARGIN:
            return None
        if distance > 0:
            return layer
    return num_layers if known == num_layers and heard else None


def changed_rows(
    traces: Sequence[DecodeTrace], schedule: ThresholdSchedule, exit_layers: Sequence[int], num_layers: int
) -> list[int]:
    """Indices of the rows that ``schedule`` may decode differently."""
    return [row for row, trace in enumerate(traces) if not row_unchanged(trace, schedule, exit_layers, num_layers)]
