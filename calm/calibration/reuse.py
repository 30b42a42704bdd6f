"""Which rows a more aggressive threshold leaves as they are, read off the trace at the threshold before.

As long as no decision of a row changes, its tokens, hence its caches, hence its confidences stay what they are. So a
row need not be decoded again when, at every token, the first checked layer whose recorded confidence reaches the new
threshold is the layer at which the row crossed before.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from ..records import DecodeTrace
from ..thresholds import ThresholdSchedule

MARGIN = 1e-6  # a confidence this close to its threshold counts as changed: the row is decoded, not guessed


def changed_rows(
    traces: Sequence[DecodeTrace], schedule: ThresholdSchedule, exit_layers: Sequence[int], num_layers: int
) -> list[int]:
    """Indices of the rows that ``schedule`` may decode differently.

    ``trace.confidences[step][layer - 1]`` must hold the measure's confidence at every checked layer up to the
    crossing, NaN where the measure has none. A row without recorded confidences, or with NaN throughout a token as a
    decode at full depth leaves them, counts as changed.
    """
    known = [row for row, trace in enumerate(traces) if len(trace.confidences) == len(trace.tokens)]
    lengths = np.array([len(traces[row].tokens) for row in known], dtype=np.int64)
    changed = set(range(len(traces))) - set(known)
    if lengths.sum():
        confidences = np.array([step for row in known for step in traces[row].confidences], dtype=np.float64)
        crossing = np.array([layer for row in known for layer in traces[row].crossing_layers], dtype=np.int64)
        steps = np.concatenate([np.arange(length) for length in lengths])
        thresholds = np.array(
            [[schedule.at(step, layer) for layer in exit_layers] for step in range(int(lengths.max()))]
        )
        columns = [layer - 1 for layer in exit_layers]
        kept = _same_decision(
            confidences[:, columns], thresholds[steps], crossing, np.array(exit_layers, dtype=np.int64), num_layers
        )
        owner = np.repeat(known, lengths)
        changed.update(np.unique(owner[~kept]).tolist())
    return sorted(changed)


def _same_decision(
    confidences: Float[np.ndarray, "tokens exits"],
    thresholds: Float[np.ndarray, "tokens exits"],
    crossing: Int[np.ndarray, " tokens"],
    exit_layers: Int[np.ndarray, " exits"],
    num_layers: int,
) -> Bool[np.ndarray, " tokens"]:
    """True where the token is sure to cross at the layer where it crossed before.

    Layers above the crossing were never seen. A token that would not cross there any more climbs into them: unsure.
    """
    distance = confidences - thresholds  # NaN compares false: a measure that says nothing never crosses
    seen = exit_layers <= crossing[:, None]
    unsure = seen & (np.abs(distance) < MARGIN)
    crosses = seen & (distance >= MARGIN)
    event = unsure | crosses
    first = event.argmax(axis=1)
    rows = np.arange(len(crossing))
    same = crosses[rows, first] & (exit_layers[first] == crossing)
    heard = (seen & ~np.isnan(confidences)).any(axis=1)  # a decode that asked no measure says nothing of one
    stays = heard & (crossing == num_layers)
    return np.asarray(np.where(event.any(axis=1), same, stays))
