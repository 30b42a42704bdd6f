"""What the answer of a report is made from: measured speeds, ROUGE-L beside full depth, and why not more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calm.rules import ROW_EXACT

from ..clocks import LIMIT
from ..said.speculative import lossless

EXIT, STATIC, SHALLOW = "exit", "static", "shallow"
EXACT = tuple(rule.value for rule in ROW_EXACT)  # batch rules under which a certificate holds
STALE = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    ZeroDivisionError,
    StopIteration,
)  # a record of another shape


OTHER = (
    "Fixed depths beside exits (experiment shallow) were measured on another model, or decoded in other numbers, so "
    "they are not compared with what was timed by batch size."
)


@dataclass(frozen=True)
class Span:
    """A middle and its ends: a mean and its 95 % interval, of clocks the median and range of the rounds."""

    at: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], name: str) -> "Span":
        """Of a row with ``name``, ``name_low`` and ``name_high``."""
        return cls(float(row[name]), row.get(f"{name}_low"), row.get(f"{name}_high"))

    @property
    def ends(self) -> tuple[float, float]:
        """Where none were measured, what two measurements of the same thing may differ by."""
        if self.low is None or self.high is None:
            return self.at * (1 - LIMIT), self.at * (1 + LIMIT)
        return self.low, self.high

    def beside(self, other: "Span | float") -> int:
        """1 or -1 where this lies wholly above or below the other, 0 where they cannot be told apart."""
        low, high = other.ends if isinstance(other, Span) else (other, other)
        return int(self.ends[0] > high) - int(self.ends[1] < low)


@dataclass(frozen=True)
class Way:
    """A way of decoding, timed beside full depth of the same engine.

    Attributes:
        kind: exit, static (a fixed depth of the same model) or shallow (a model trained with fewer layers).
        name: a measure, or ``static depth 4``.
        speed: how many times as fast as full depth it decodes, encoder left out.
        call: the same of whole calls, all included.
        quality: ROUGE-L minus full depth's, 0 to 1; ``quality_at`` says at which other threshold, where it was one.
        threshold, tolerance: of an exit; without a tolerance it is not certified.
        ahead: of an exit, by the name of a fixed depth: the sign of its quality beside it, from the same articles, and
            of its speed, from the same rounds; 0 where they cannot be told apart.
    """

    kind: str
    name: str
    batch: int
    speed: Span
    rule: str | None = None
    call: Span | None = None
    quality: Span | None = None
    quality_at: float | None = None
    threshold: float | None = None
    tolerance: float | None = None
    depth: float | None = None
    ahead: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def certified(self) -> bool:
        """For any batch that it is decoded in."""
        return self.kind == EXIT and self.tolerance is not None and self.rule in EXACT


@dataclass(frozen=True)
class Quality:
    """ROUGE-L of answers minus full depth's, and the share of decoder layers skipped.

    Attributes:
        kind, name, threshold, tolerance, depth: as in Way.
        picked: by dev, of the certified ones.
    """

    kind: str
    name: str
    span: Span | None
    skipped: float
    threshold: float | None = None
    tolerance: float | None = None
    depth: float | None = None
    picked: bool = False


@dataclass(frozen=True)
class Evidence:
    """Of all experiments that are there.

    Attributes:
        qualities: of a run of eval.table1, then of eval.thresholds.
        gap: what keeps the speed below what the skipped layers promise, in words; empty where it was not measured.
        lossless: what drafts bring, which change no answer, in words.
        noisy: the ways were timed on a machine that did something else too.
        unknown: what is not known, in words.
    """

    ways: Sequence[Way] = ()
    qualities: Sequence[Quality] = ()
    gap: Sequence[str] = ()
    lossless: Sequence[str] = ()
    noisy: bool = False
    unknown: Sequence[str] = ()

    @property
    def batches(self) -> list[int]:
        return sorted({way.batch for way in self.ways if way.kind == EXIT})


def gathered(
    summaries: Mapping[str, Mapping[str, Any]], records: Path | None, said: Mapping[str, Sequence[str]],
    unknown: Sequence[str],
) -> Evidence:  # fmt: skip
    """All that there is; records of another shape count as not there.

    Args:
        summaries, said: by experiment.
        records: folder of a run of eval.table1.
    """
    from .readings import is_noisy, shallow_ways, table_qualities, thresholds_qualities, timed_ways

    qualities = [] if records is None else table_qualities(records)
    qualities += thresholds_qualities(summaries.get("thresholds"))
    batching, shallow = (summaries.get(name) for name in ("batching", "shallow"))
    if batching is not None and shallow is not None and not same_decoding(batching, shallow):
        unknown = [*unknown, OTHER]
        shallow = None
    ways = together(timed_ways(batching), shallow_ways(shallow))
    return Evidence(
        [filled(way, qualities) for way in ways], qualities, said.get("breakdown", ()), drafts(summaries),
        any(is_noisy(each or {}) for each in (batching, shallow)), unknown,
    )  # fmt: skip


def drafts(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the record of eval.speculative says of drafts on the clock."""
    try:
        return lossless(summaries["speculative"]) if "speculative" in summaries else []
    except STALE:
        return []


def same_decoding(batching: Mapping[str, Any], shallow: Mapping[str, Any]) -> bool:
    """Whether both are of one model in one dtype; records of another shape are not."""
    try:
        one, other = batching["identity"], shallow["models"][0]
        return bool(one["model"] == other["model"] and batching["dtype"] == shallow["dtype"])
    except STALE:
        return False


def together(by_size: Sequence[Way], beside_fixed: Sequence[Way]) -> list[Way]:
    """Exits by batch size and rule, and what stood beside them in one run.

    At a batch size of ``beside_fixed`` its fixed depths count and its exits, and of ``by_size`` the other rules.
    Quality is a row's own under every exact rule, so what articles told of an exit's holds at every batch size.
    """
    sizes = {way.batch for way in beside_fixed}
    rules = {(way.batch, way.name, way.rule) for way in beside_fixed if way.kind == EXIT}
    found = list(beside_fixed)
    for way in by_size:
        if way.batch in sizes and (way.kind != EXIT or (way.batch, way.name, way.rule) in rules):
            continue
        same = [each for each in beside_fixed if each.kind == way.kind and each.name == way.name]
        same = [each for each in same if each.threshold == way.threshold]
        if not same or (way.kind == EXIT and way.rule not in EXACT):
            found.append(way)
            continue
        rivals = {
            each.name: each for each in (*beside_fixed, *by_size) if each.batch == way.batch and each.kind != EXIT
        }
        ahead = {
            name: (quality, way.speed.beside(rivals[name].speed))
            for name, (quality, _) in same[0].ahead.items()
            if name in rivals
        }
        found.append(replace(way, quality=same[0].quality, ahead=ahead))
    return found


def filled(way: Way, qualities: Sequence[Quality]) -> Way:
    """With the quality of the same fixed depth, or of the same measure: at its threshold, else at the certified one."""
    if way.quality is not None or way.kind == SHALLOW:
        return way
    same = [each for each in qualities if each.kind == way.kind and each.span is not None]
    if way.kind == STATIC:
        found = next((each for each in same if each.depth == way.depth), None)
        return way if found is None else replace(way, quality=found.span)
    same = [each for each in same if each.name == way.name]
    exact = next((each for each in same if each.threshold == way.threshold), None)
    if exact is not None:
        return replace(way, quality=exact.span)
    certified = next((each for each in same if each.tolerance == way.tolerance is not None), None)
    return way if certified is None else replace(way, quality=certified.span, quality_at=certified.threshold)
