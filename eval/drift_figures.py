"""Figures of eval.drift: depth and quality of the same requests under several actions, alarms in shuffled orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Float

from calm.calibration import ConsistencyLoss
from calm.calibration.grid import Threshold, point_to_json
from calm.config import Consistency
from calm.metrics import agreement, bootstrap_ci, depth_summary, mean, rouge_l_many
from calm.records import DecodeTrace, Example
from serve.drift import Reference, ShiftDetector, share_skipped

Rows = Float[np.ndarray, " rows"]


@dataclass(frozen=True)
class Scores:
    """Of each request of one stretch under one action.

    Attributes:
        losses: as the certificate counts them; their mean is the risk.
        rouge_l: to the reference.
    """

    traces: Sequence[DecodeTrace]
    losses: Rows
    rouge_l: Rows


class Judge:
    """Scores answers to the same examples against one decode of them at full depth.

    Args:
        kind: of the certificate's loss.
        seed, bootstrap: of intervals of differences.
    """

    def __init__(
        self,
        kind: Consistency,
        examples: Sequence[Example],
        full: Sequence[DecodeTrace],
        num_layers: int,
        seed: int = 0,
        bootstrap: int = 1_000,
    ) -> None:
        self._loss = ConsistencyLoss(kind, examples, full)
        self._references = [example.target for example in examples]
        self._layers, self._seed, self._bootstrap = num_layers, seed, bootstrap
        self.full = self.scores(full)

    def scores(self, traces: Sequence[DecodeTrace]) -> Scores:
        """Raises CalibrationError unless the traces belong to the examples, row by row."""
        rouge_l = rouge_l_many([trace.text for trace in traces], self._references)
        return Scores(traces, self._loss(traces), rouge_l)

    def summary(self, scores: Scores, picks: Sequence[int]) -> dict[str, Any] | None:
        """Means over the requests of these numbers; None of none.

        Layers are over tokens; ``answer_skipped`` is the mean of an answer's own share, which drift looks at.
        """
        if not picks:
            return None
        chosen = [scores.traces[i] for i in picks]
        depth = depth_summary(chosen, self._layers)
        return {
            "requests": len(picks),
            "mean_exit_layer": depth["mean_layers"],
            "layers_skipped": depth["layers_skipped"],
            "answer_skipped": mean(shares(chosen, self._layers)),
            "risk": mean(scores.losses[list(picks)]),
            "rouge_l": mean(scores.rouge_l[list(picks)]),
            "rouge_l_to_full": agreement(chosen, [self.full.traces[i] for i in picks])["rouge_l_to_full"],
            "full_rouge_l": mean(self.full.rouge_l[list(picks)]),
        }

    def change(self, scores: Scores, other: Scores, picks: Sequence[int]) -> dict[str, Any] | None:
        """Mean difference from ``other`` on the requests of these numbers, pair by pair, with its 95 % interval."""
        if not picks:
            return None
        told: dict[str, Any] = {}
        for name, mine, theirs in (
            ("risk", scores.losses, other.losses),
            ("rouge_l", scores.rouge_l, other.rouge_l),
        ):
            difference = (mine - theirs)[list(picks)]
            told[name] = mean(difference)
            told[f"{name}_interval"] = list(bootstrap_ci(difference, self._seed, self._bootstrap))
        return told


def shares(traces: Sequence[DecodeTrace], num_layers: int) -> list[float]:
    """Of layers skipped, by answer."""
    return [share_skipped(trace.emission_layers, num_layers) for trace in traces]


def spans(thresholds: Sequence[Threshold], grid: Sequence[Threshold], judge: Judge, scores: Scores) -> list[Any]:
    """Stretches of requests that decoded with the same threshold, in order, each with its place in the grid."""
    told, start = [], 0
    for threshold, group in groupby(thresholds):
        count = len(list(group))
        summary = judge.summary(scores, range(start, start + count))
        place = list(grid).index(threshold)
        told.append({"first": start, "threshold": point_to_json(threshold), "place": place, **(summary or {})})
        start += count
    return told


def shuffled(
    reference: Reference, requests_per_alarm: float, values: Sequence[float], shuffles: int, seed: int
) -> dict[str, Any]:
    """Whether and when a new detector alarms on these answers' shares, in each of several random orders.

    Returns:
        shuffles, requests; alarms: orders that raised one; after: answers until then, least, median and most, None
        without any; log_evidence: the most that was seen.
    """
    generator, found, most = np.random.default_rng(seed), list[int](), 1.0
    for _ in range(shuffles):
        detector = ShiftDetector(reference, requests_per_alarm)
        for number, place in enumerate(generator.permutation(len(values)), start=1):
            alarmed = detector.saw(values[place])
            most = max(most, detector.evidence)
            if alarmed:
                found.append(number)
                break
    after = [min(found), float(np.median(found)), max(found)] if found else None
    return {
        "shuffles": shuffles,
        "requests": len(values),
        "alarms": len(found),
        "after": after,
        "log_evidence": float(np.log(most)),
    }
