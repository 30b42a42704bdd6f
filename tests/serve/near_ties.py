"""decode_one with what it nearly did, and whether an answer that differs from it is excused by a near-tie.

Batches of other sizes round fp32 differently in the last bits. A row may differ only if, at its first differing token,
a confidence lies within 1e-5 (relative) of its threshold or the two largest logits do of each other.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import torch

from calm.config import Measure
from calm.decode import OneDecoder
from calm.policies import Confident, Policy
from calm.records import DecodeTrace, Example
from serve.requests import Answer

from .models import policy_for, rows, tiny

CLOSE = 1e-5
SHARE = 0.005


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
    """decode_one, which it is proven against elsewhere, told to remember the gaps of its logits."""

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


@cache
def told(number: int, kind: str, shape: str = "v1.1") -> Told:
    """What decode_one says to the source ``number`` of ``models.rows`` under a policy of ``models.policy_for``."""
    name = "reference"
    example = Example(name, name, rows()[number].source, "")
    return Reference(tiny(shape), record_confidences=True).tell(example, policy_for(kind, name, number))


@dataclass
class Tally:
    """Counts rows and those that a near-tie excuses."""

    rows: int = 0
    ties: int = 0
    depths: set[int] = field(default_factory=set)

    def compare(self, answer: Answer, told: Told, *, limit: int | None = None) -> None:
        """Raise AssertionError unless the answer is the reference's, cut at ``limit`` tokens, or nearly so.

        An answer that was cancelled is compared as far as it came.
        """
        trace = told.trace
        length = len(trace.tokens) if limit is None else min(limit, len(trace.tokens))
        if answer.status.value == "cancelled":
            length = min(length, len(answer.tokens))
        mine = list(zip(answer.tokens, answer.crossing_layers, strict=True))
        theirs = list(zip(trace.tokens, trace.crossing_layers, strict=True))[:length]
        self.rows += 1
        self.depths |= set(answer.crossing_layers)
        if mine == theirs:
            return
        pairs = zip(mine, theirs, strict=False)
        first = next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(mine), len(theirs)))
        assert told.nearly(first), f"{answer.id}: differs at token {first}: {mine} instead of {theirs}"
        self.ties += 1

    def check(self, *, depths: int = 3) -> None:
        """Print the count; near-ties must be rare, and depths must vary, or nothing of the backfill is read."""
        print(f"{self.ties} near-ties in {self.rows} rows, depths {sorted(self.depths)}")
        assert len(self.depths) >= depths, self.depths
        assert self.ties == 0 or self.ties < SHARE * self.rows, f"{self.ties} of {self.rows}"
