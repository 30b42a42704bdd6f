"""Answers against decode_one's: counted, and each difference either excused by a near-tie or an error."""

from dataclasses import dataclass, field
from functools import cache

from calm.near_ties import Reference, Told, parts_at
from calm.records import Example
from serve.requests import Answer

from .models import policy_for, rows, tiny

SHARE = 0.005


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
        mine, theirs = (answer.tokens, answer.crossing_layers), (trace.tokens[:length], trace.crossing_layers[:length])
        self.rows += 1
        self.depths |= set(answer.crossing_layers)
        first = parts_at(mine, theirs)
        if first is not None:
            assert told.nearly(first), f"{answer.id}: differs at token {first}: {mine} instead of {theirs}"
            self.ties += 1

    def check(self, *, depths: int = 3) -> None:
        """Print the count; near-ties must be rare, and depths must vary, or nothing of the backfill is read."""
        print(f"{self.ties} near-ties in {self.rows} rows, depths {sorted(self.depths)}")
        assert len(self.depths) >= depths, self.depths
        assert self.ties == 0 or self.ties < SHARE * self.rows, f"{self.ties} of {self.rows}"
