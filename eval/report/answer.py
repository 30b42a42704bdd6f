"""Whether early exit is worth it, at which threshold, under which batch rule and why not more: in words, by rule.

Of a batch size: a certified exit is worth it where its decode steps (and, where they were timed, its whole calls) are
faster than full depth's, and every fixed depth and shallow model that was timed is clearly slower or clearly worse. It
is not, where one is clearly ahead in one of the two and not clearly behind in the other. In between nothing is decided.
Speeds are measured clocks; without any, nothing is said of speed. ROUGE-L is told in points of a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..said.words import interval, listed, shown_threshold
from .evidence import EXACT, EXIT, Evidence, Quality, Span, Way


class Worth(str, Enum):
    """Of a batch size, or of all."""

    yes = "worth it"
    no = "not worth it"
    open = "not decided"
    unknown = "not known"


@dataclass(frozen=True)
class Answer:
    """Sentences by what they are about, in the order of the page; ``best`` is the exit to use at each batch size."""

    worth: Worth
    headline: str
    sentences: dict[str, list[str]] = field(default_factory=dict)
    best: dict[int, Way] = field(default_factory=dict)

    def flat(self) -> list[str]:
        return [self.headline, *(text for texts in self.sentences.values() for text in texts)]


@dataclass(frozen=True)
class Batch:
    """What was found at a batch size."""

    size: int
    worth: Worth
    text: str
    best: Way | None = None


def answered(evidence: Evidence) -> Answer:
    """The answer of a whole report."""
    batches = [_at(size, [way for way in evidence.ways if way.batch == size]) for size in evidence.batches]
    best = {each.size: each.best for each in batches if each.worth is Worth.yes and each.best is not None}
    worth, headline = _headline(evidence, batches)
    noise = ["A busy machine was timed (the record says noisy): measure again on a quiet one before you rely on it."]
    sentences = {
        "Speed and quality": [*(noise if evidence.noisy else ()), *(each.text for each in batches)],
        "Without any loss": list(evidence.lossless),
        "Threshold and batch rule": _recommended(evidence, best),
        "Why not more": _why_not_more(evidence),
        "What is not known": list(evidence.unknown),
    }
    return Answer(worth, headline, {name: texts for name, texts in sentences.items() if texts}, best)


def _headline(evidence: Evidence, batches: Sequence[Batch]) -> tuple[Worth, str]:
    if (
        evidence.qualities
        and not any(_useful(row) for row in evidence.qualities)
        and not any(way.certified for way in evidence.ways)
    ):
        return Worth.no, "Early exit is not worth it here as it stands: no threshold that skips a layer is certified."
    known = [each for each in batches if each.worth is not Worth.unknown]
    if not known:
        return Worth.unknown, (
            "Whether early exit is worth it here is not known: its decode steps were not timed beside full depth."
        )
    by = {worth: [f"{each.size}" for each in known if each.worth is worth] for worth in Worth}
    parts = [f"{worth.value} at batch {listed(by[worth])}" for worth in (Worth.yes, Worth.no, Worth.open) if by[worth]]
    worth = Worth.yes if by[Worth.yes] else Worth.open if by[Worth.open] else Worth.no
    busy = " (timed on a busy machine)" if evidence.noisy else ""
    return worth, f"Early exit here is {'; '.join(parts)}{busy}."


def _useful(row: Quality) -> bool:
    return row.tolerance is not None and row.skipped > 0


def _at(size: int, ways: Sequence[Way]) -> Batch:
    """The verdict on a batch size, its best exit and the rivals."""
    exits = sorted((way for way in ways if way.certified), key=lambda way: -way.speed.at)
    rivals = [way for way in ways if way.kind != EXIT]
    if not exits:
        return Batch(size, Worth.unknown, f"Batch {size}: no certified exit was timed.")
    faster = [way for way in exits if way.speed.beside(1.0) > 0]
    if not faster:
        if exits[0].speed.beside(1.0) < 0:
            text = f"Batch {size}: {_measured(exits[0])}: slower than full depth, so exits are not worth it."
            return Batch(size, Worth.no, text)
        text = f"Batch {size}: {_measured(exits[0])}: that cannot be told from full depth."
        return Batch(size, Worth.open, text, exits[0])
    free = [way for way in faster if not any(dominates(rival, way) for rival in rivals)]
    if not free:
        rival = next(each for each in rivals if dominates(each, faster[0]))
        text = f"{_measured(faster[0])}; {_pair(rival)}: not worth it, for that is {_why(rival, faster[0])}."
        return Batch(size, Worth.no, f"Batch {size}: {text}")
    best = next((way for way in free if all(settled(way, rival) for rival in rivals)), free[0])
    gentler = [way for way in free if way.name != best.name and beats(way, best)]
    text = "; ".join([f"Batch {size}: {_measured(best)}", *map(_pair, [*rivals, *gentler])])
    if gentler:
        text += "; of these exits none is best in both"
    open_ones = [rival.name for rival in rivals if not settled(best, rival)]
    if open_ones:
        return Batch(size, Worth.open, f"{text}. Exits are not shown to be better than {listed(open_ones)}.", best)
    if best.call is not None and best.call.beside(1.0) <= 0:
        return Batch(size, Worth.open, f"{text}. Whole calls are not shown to be faster.", best)
    return Batch(size, Worth.yes, f"{text}.", best)


def dominates(rival: Way, way: Way) -> bool:
    """Clearly ahead in one of speed and quality and not clearly behind in the other, where both answered the same
    articles in the same rounds. Elsewhere it must be as good at worst: the lower end of what its quality may be is not
    below the other's. Never where a quality is not known.
    """
    if rival.name in way.ahead:
        ahead = way.ahead[rival.name]
        return max(ahead) <= 0 and min(ahead) < 0
    if rival.quality is None or way.quality is None:
        return False
    as_good = rival.quality.at >= way.quality.at and rival.quality.ends[0] >= way.quality.ends[0]
    return as_good and rival.speed.at >= way.speed.at and (rival.speed.beside(way.speed) > 0 or beats(rival, way))


def settled(way: Way, rival: Way) -> bool:
    """Clearly faster than a rival, or clearly better."""
    if rival.name in way.ahead:
        return max(way.ahead[rival.name]) > 0
    return way.speed.beside(rival.speed) > 0 or beats(way, rival)


def beats(way: Way, other: Way) -> bool:
    """Clearly better in quality."""
    return way.quality is not None and other.quality is not None and way.quality.beside(other.quality) > 0


def _why(rival: Way, way: Way) -> str:
    """What a rival that dominates is beside an exit."""
    quality, speed = way.ahead.get(rival.name, (-int(beats(rival, way)), -rival.speed.beside(way.speed)))
    if quality == speed:
        return "faster and better"
    if speed < 0:
        return "faster, and its ROUGE-L cannot be told apart"
    return "better, and its speed cannot be told apart"


def _measured(way: Way) -> str:
    certificate = f"at risk {way.tolerance:g} " if way.tolerance is not None else ""
    call = "" if way.call is None else f" and whole calls {_times(way.call)}"
    return (
        f"{certificate}decode steps run {_times(way.speed)} times as fast as full depth's{call} ({_short(way)}, rule "
        f"{way.rule}) {_quality(way)}"
    )


def _pair(way: Way) -> str:
    return f"{_short(way)} gives {_times(way.speed)} {_quality(way)}"


def _short(way: Way) -> str:
    return way.name if way.threshold is None else f"{way.name} at {shown_threshold(way.threshold)}"


def _times(span: Span) -> str:
    return interval(span.at, span.low, span.high)


def _quality(way: Way) -> str:
    other = (
        "" if way.quality_at is None else f" (of its certified threshold in fp32, {shown_threshold(way.quality_at)})"
    )
    return _difference(way.quality) + other


def _difference(span: Span | None) -> str:
    """To full depth's ROUGE-L; gain and loss are said only of intervals that leave 0 out."""
    if span is None:
        return "at a ROUGE-L that is not known"
    if span.low is None or span.high is None or span.low <= 0 <= span.high:
        return (
            f"at full depth's ROUGE-L as far as can be told ({interval(span.at, span.low, span.high, 1, 100)} points)"
        )
    if span.at < 0:
        return f"at a loss of {interval(-span.at, -span.high, -span.low, 1, 100)} points of ROUGE-L"
    return f"with a gain of {interval(span.at, span.low, span.high, 1, 100)} points of ROUGE-L"


def _recommended(evidence: Evidence, best: dict[int, Way]) -> list[str]:
    """Threshold and rule by batch size; without clocks what dev picked, as layers."""
    if best:
        by: dict[tuple[str, str | None], list[str]] = {}
        for size, way in best.items():
            by.setdefault((_short(way), way.rule), []).append(str(size))
        risks = sorted({f"{way.tolerance:g}" for way in best.values()})
        texts = [f"{name} under rule {rule} at batch {listed(sizes)}" for (name, rule), sizes in by.items()]
        return [f"Recommended, certified for risk {listed(risks)}: {'; '.join(texts)}."]
    useful = [row for row in evidence.qualities if _useful(row)]
    if not useful:
        return []
    if evidence.batches:
        return [f"Nothing is recommended but full depth or a fixed one. Of {_layers(useful)}"]
    return [
        f"Of {_layers(useful)} Whether that is time is not known, and so no batch rule is recommended; a "
        f"certificate holds in any batch under {listed(EXACT)}."
    ]


def _layers(rows: Sequence[Quality]) -> str:
    row = next((row for row in rows if row.picked), rows[0])
    why = "dev picked" if row.picked else "the first is"
    threshold = "" if row.threshold is None else f" at {shown_threshold(row.threshold)}"
    return (
        f"the thresholds certified for risk {row.tolerance:g} {why} {row.name}{threshold}: {100 * row.skipped:.1f} % "
        f"of the decoder layers skipped (a share of layers, no speed-up) {_difference(row.span)}."
    )


def _why_not_more(evidence: Evidence) -> list[str]:
    if evidence.gap:
        return list(evidence.gap)
    return ["Where the time goes was not measured (experiment breakdown), so what holds the speed back is not known."]
