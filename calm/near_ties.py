"""Whether an answer that differs from decode_one's is excused by the last bits of its numbers (design.md section 4).

Batches of other sizes, and other runners, round fp32 differently in the last bits. A row may differ only if, at its
first differing token, a confidence lies within 1e-5 (relative) of its threshold or the two largest logits do of each
other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import Measure
from .decode import OneDecoder
from .policies import Confident, Policy
from .records import DecodeTrace, Example

CLOSE = 1e-5


def parts_at(mine: tuple[Sequence[int], Sequence[int]], theirs: tuple[Sequence[int], Sequence[int]]) -> int | None:
    """The first position where tokens or crossing layers (both of each) differ, or one ends; None: they are equal."""
    left, right = (list(zip(*each, strict=True)) for each in (mine, theirs))
    if left == right:
        return None
    differing = (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))


@dataclass(frozen=True)
class Told:
    """A trace, and for each token the relative gap of the two largest logits at every look at the head."""

    trace: DecodeTrace
    gaps: tuple[tuple[float, ...], ...]
    policy: Policy

    def nearly(self, step: int) -> bool:
        """Whether a last bit could have changed this token or its layer."""
        if step >= len(self.trace.tokens):
            return False
        looks = self.gaps[step]
        by_words = isinstance(self.policy, Confident) and self.policy.measure is Measure.agreement
        if min(looks if by_words else looks[-1:]) < CLOSE:
            return True
        if not isinstance(self.policy, Confident):
            return False
        for layer, confidence in enumerate(self.trace.confidences[step], start=1):
            if math.isnan(confidence) or self.policy.measure is Measure.agreement:
                continue
            threshold = self.policy.schedule.at(step, layer)
            if math.isfinite(threshold) and abs(confidence - threshold) < CLOSE * max(confidence, threshold):
                return True
        return False


class Reference(OneDecoder):
    """decode_one, told to remember the gaps of its logits."""

    def tell(self, example: Example, policy: Policy) -> Told:
        model, looks, gaps = self.model, [], []
        see, speak = model.logits, self.adapter.logits

        def seen(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = see(hidden)
            top = logits.float().flatten(0, -2).topk(2).values[0].tolist()
            looks.append((top[0] - top[1]) / max(abs(top[0]), abs(top[1]), 1e-30))
            return logits

        def spoken(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = speak(hidden)
            gaps.append(tuple(looks))
            looks.clear()
            return logits

        model.__dict__["logits"], self.adapter.logits = seen, spoken  # type: ignore[method-assign]
        try:
            trace = self([example], policy)[0]
        finally:
            del model.__dict__["logits"], self.adapter.logits
        return Told(trace, tuple(gaps), policy)
