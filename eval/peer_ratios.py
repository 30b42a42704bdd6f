"""From raw seconds to the table of ratios: how many times faster ours is. Pure arithmetic on samples.

A ratio is the other's time over ours, taken in each round of the interleaved run, so that a slow moment of the
machine falls on both; of the rounds the median counts, with the quartiles beside it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .peer_plan import OURS, Depths, Entrant, neighbours, speaking

CLOCKS = ("decode", "call")


@dataclass(frozen=True)
class Samples:
    """Seconds of whole calls, by entrant and round: at ``few`` tokens and at ``many``."""

    few: int
    many: int
    seconds: Mapping[str, Sequence[tuple[float, float]]]

    def of(self, name: str, clock: str) -> list[float]:
        """Per round: seconds of one decode step, or of the whole call at ``many`` tokens."""
        if clock == "decode":
            return [(long - short) / (self.many - self.few) for short, long in self.seconds[name]]
        return [long for _, long in self.seconds[name]]

    def median(self, name: str, clock: str) -> float:
        return statistics.median(self.of(name, clock))


def quotient(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float | None]:
    """``ratio``, ``low`` and ``high``: median and quartiles of theirs over ours, round by round.

    Rounds in which one of the two is not above zero, which only noise brings about, do not count; None where fewer
    than half are left.
    """
    pairs = list(zip(theirs, ours, strict=True))
    values = sorted(a / b for a, b in pairs if a > 0 and b > 0)
    if len(values) * 2 < len(pairs) or not values:
        return {"ratio": None, "low": None, "high": None}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"ratio": statistics.median(values), "low": low, "high": high}


def interpolated(low: Sequence[float], high: Sequence[float], share: float) -> list[float]:
    """Per round: between two depths, ``share`` of the way to the deeper one."""
    return [(1 - share) * a + share * b for a, b in zip(low, high, strict=True)]


Series = Callable[[str], Sequence[float]]


class Table:
    """The ratios of one case.

    Args:
        labels: shape, source_tokens, batch, threads of every row.
        predicted: seconds of the tokens ``few`` to ``many`` by the cost table, by entrant; none where there is none.
    """

    def __init__(
        self,
        labels: Mapping[str, Any],
        entrants: Sequence[Entrant],
        samples: Samples,
        depths: Sequence[Depths],
        num_layers: int,
        predicted: Mapping[str, float],
    ) -> None:
        self.labels, self.entrants, self.samples = labels, entrants, samples
        self.depths, self.num_layers, self.predicted = depths, num_layers, predicted

    def rows(self) -> list[dict[str, Any]]:
        """Full depth against every peer; exits against every peer, our full depth and static depth."""
        found = []
        for clock in CLOCKS:
            full = [e for e in self.entrants if e.role == "full"]
            fastest = min(full, key=lambda e: self.samples.median(e.name, clock), default=None)
            ours = [*full, *(e for e in self.entrants if e.role == "exit")]
            for against, peer in self._peers(clock).items():
                for entrant in ours:
                    theirs = self.samples.of(peer.name, clock)
                    found.append(self._row(entrant, against, clock, theirs, peer.name, entrant is fastest))
            for entrant in ours:
                if entrant.role == "exit":
                    found += self._against_own(entrant, clock)
        return found

    def _peers(self, clock: str) -> dict[str, Entrant]:
        """The fastest of each peer."""
        found: dict[str, Entrant] = {}
        for entrant in self.entrants:
            if entrant.against == OURS:
                continue
            known = found.get(entrant.against)
            if known is None or self.samples.median(entrant.name, clock) < self.samples.median(known.name, clock):
                found[entrant.against] = entrant
        return found

    def _against_own(self, entrant: Entrant, clock: str) -> list[dict[str, Any]]:
        full = self._own(entrant, self.num_layers)
        if full is None:
            return []
        expected = self._expected(self.predicted.get, full, entrant) if clock == "decode" else None
        rows = [self._row(entrant, "own-full", clock, self.samples.of(full, clock), full, predicted=expected)]
        mean = self._mean(entrant, clock)
        around = [self._own(entrant, layer) for layer in neighbours(mean)]
        names = [name for name in around if name is not None]
        if len(names) == len(around):
            share = mean - int(mean)
            theirs = interpolated(self.samples.of(names[0], clock), self.samples.of(names[-1], clock), share)
            known = [self.predicted.get(name) for name in (names[0], names[-1], entrant.name)]
            expected = None
            if clock == "decode" and all(known):
                low, high, own = (float(value or 0.0) for value in known)
                expected = ((1 - share) * low + share * high) / own
            rows.append(self._row(entrant, "static", clock, theirs, f"static-{mean:.3f}", predicted=expected))
        return rows

    @staticmethod
    def _expected(seconds: Callable[[str], float | None], theirs: str, entrant: Entrant) -> float | None:
        other, own = seconds(theirs), seconds(entrant.name)
        return other / own if other and own else None

    def _own(self, entrant: Entrant, layer: int) -> str | None:
        """Our full or static depth in the same dtype, under the head that speaks there; None where it did not run."""
        head = speaking(entrant)
        for each in self.entrants:
            depth = {"full": self.num_layers, "static": each.layer}.get(each.role)
            if depth == layer and (each.dtype, each.head) == (entrant.dtype, head):
                return each.name
        return None

    def _mean(self, entrant: Entrant, clock: str) -> float:
        """Mean depth of the tokens that this clock sees."""
        asked = next(d for d in self.depths if (d.trace.value, d.measure) == (entrant.trace, entrant.measure))
        return asked.decode if clock == "decode" else asked.call

    def _row(
        self,
        entrant: Entrant,
        against: str,
        clock: str,
        theirs: Sequence[float],
        peer: str,
        fastest: bool = False,
        predicted: float | None = None,
    ) -> dict[str, Any]:
        """One row: what was compared, the ratio, and the two times in milliseconds behind it."""
        own = self.samples.of(entrant.name, clock)
        exit_labels = ("measure", "rule", "trace")
        return {
            "ours": entrant.role,
            "against": against,
            "clock": clock,
            "head": entrant.head,
            "dtype": entrant.dtype,
            **{name: getattr(entrant, name) if entrant.role == "exit" else None for name in exit_labels},
            **self.labels,
            **quotient(theirs, own),
            "predicted": predicted,
            "peer": peer,
            "fastest": fastest,
            "ours_ms": 1000 * statistics.median(own),
            "theirs_ms": 1000 * statistics.median(theirs),
        }


SHOWN = (
    "ours",
    "against",
    "dtype",
    "head",
    "rule",
    "trace",
    "ratio",
    "low",
    "high",
    "predicted",
    "ours_ms",
    "theirs_ms",
)


def as_text(rows: Sequence[Mapping[str, Any]], clock: str = "decode") -> str:
    """The rows of one clock for the terminal, the cases apart."""
    lines: list[str] = []
    case = None
    picked = [row for row in rows if row["clock"] == clock]
    widths = {name: max([len(name), *(len(_shown(row[name])) for row in picked)]) for name in SHOWN}
    for row in picked:
        this = (row["shape"], row["source_tokens"], row["batch"], row["threads"])
        if this != case:
            case = this
            lines += ["", f"{this[0]} shape, source {this[1]}, batch {this[2]}, threads {this[3]}; clock: {clock}"]
            lines.append("  ".join(name.rjust(widths[name]) for name in SHOWN))
        lines.append("  ".join(_shown(row[name]).rjust(widths[name]) for name in SHOWN))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
