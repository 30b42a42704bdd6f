"""What users saw of requests that came at once: throughput, latencies, and how many decoded at once.

Definitions (arXiv 2407.20272, section 5): throughput is all tokens by wall clock; inner-token latency is the sum over
sequences of (end - first token) by all tokens. Throughput times latency is how many sequences decoded at once
(Little's law): a latency that is lower because fewer decoded is no gain of early exit, so concurrency stands beside
every latency, and full depth's latency at the same concurrency too.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calm.errors import CalmError

if TYPE_CHECKING:
    from serve.requests import Answer

FULL = "full"


@dataclass(frozen=True)
class Session:
    """What a user saw of some requests that came at once.

    Attributes:
        seconds: from the first to arrive to the last to end.
        ttft, tpot: medians over the requests, of those of more than one token for ``tpot``.
    """

    requests: int
    tokens: int
    seconds: float
    ttft: float
    tpot: float
    inner_token_latency: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def concurrency(self) -> float:
        """Sequences that decoded at once, by Little's law."""
        return self.tokens_per_s * self.inner_token_latency


def session_of(answers: "Sequence[Answer]") -> Session:
    """Raise CalmError for an answer that failed."""
    failed = next((answer for answer in answers if answer.error), None)
    if failed is not None:
        raise CalmError(f"{failed.id}: {failed.error}")
    times = [answer.timing for answer in answers]
    tokens = sum(len(answer.tokens) for answer in answers)
    decoding = [each.ended - each.first_token for each in times]
    several = [
        (each.ended - each.first_token) / (len(answer.tokens) - 1)
        for each, answer in zip(times, answers, strict=True)
        if len(answer.tokens) > 1
    ]
    return Session(
        requests=len(answers),
        tokens=tokens,
        seconds=max(each.ended for each in times) - min(each.arrived for each in times),
        ttft=statistics.median(each.first_token - each.arrived for each in times),
        tpot=statistics.median(several) if several else 0.0,
        inner_token_latency=sum(decoding) / tokens,
    )


def middle(sessions: Sequence[Session]) -> dict[str, float]:
    """Medians over the rounds."""
    names = ("tokens_per_s", "ttft", "tpot", "inner_token_latency", "concurrency")
    return {name: statistics.median(getattr(each, name) for each in sessions) for name in names}


def neighbours(mean: float) -> tuple[int, ...]:
    """The whole depths that a mean lies between: two, or one."""
    return tuple(sorted({math.floor(mean), math.ceil(mean)}))


def between(mean: float, of: Callable[[int], Sequence[float]]) -> list[float]:
    """Interpolated to a depth between two whole ones, round by round."""
    around = neighbours(mean)
    if len(around) == 1:
        return list(of(around[0]))
    share = mean - around[0]
    return [(1 - share) * low + share * high for low, high in zip(of(around[0]), of(around[1]), strict=True)]


def at_equal_concurrency(entries: Sequence[dict[str, Any]]) -> None:
    """Beside every latency, that of full depth where as many sequences decode: interpolated over the batch sizes.

    Outside the batch sizes that ran, the nearest counts. Adds ``full_latency_at_equal_concurrency`` to each entry.
    """
    points = sorted((e["concurrency"], e["inner_token_latency"]) for e in entries if e["ours"] == FULL)
    for entry in entries:
        entry["full_latency_at_equal_concurrency"] = interpolated(points, entry["concurrency"])


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between points of ascending x; the first or last beyond them."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in zip(points, points[1:], strict=False):
        if at <= high:
            return before + (after - before) * (at - low) / (high - low) if high > low else after
    return points[-1][1]
