"""Where words stand on a panel: names of baselines, and what is beside points; each where it hides least.

Of a few places a word takes the one with the fewest lines, markers and other words under it, of equals the first. Both
drawings ask here, so lengths are points of a panel as wide and high as matplotlib's, and letters are taken to be alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log2
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .panels import Ends, Level, Panel, Series

ROOM = 250.0  # of the axes, each way
LETTER, DIGIT = 4.2, 5.3  # a letter of a name, and one of a text
LINE = 10.0  # of either, in height
RIM = 7.5  # of the axes, around a legend
SAMPLE = 38.0  # of a line in a legend, with the room around it
APART = 4.0  # a text from its point
MARKER = 3.0  # from a marker's middle to its rim
STEP = 3.0  # between the dots that a line is taken for
BESIDE = (
    "top right", "top left", "bottom right", "bottom left", "top center", "bottom center", "middle right", "middle left"
)  # fmt: skip
# shares of a baseline: at the first its name begins, at the second it ends, at the others it has its middle
ALONG = (0.02, 0.98, 0.5, 0.26, 0.74, 0.14, 0.38, 0.62, 0.86)

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Box:
    """What a word covers."""

    left: float
    bottom: float
    right: float
    top: float

    def hides(self, dots: Sequence[Point]) -> float:
        """How many are under it; to reach over the rim of the axes is worse than any."""
        over = max(-self.left, -self.bottom, self.right - ROOM, self.top - ROOM, 0.0)
        return 100 * over + sum(self.left <= x <= self.right and self.bottom <= y <= self.top for x, y in dots)

    def dots(self) -> list[Point]:
        """Lines of it, one above the other."""
        lines = (self.bottom + share * (self.top - self.bottom) for share in (0.0, 0.5, 1.0))
        return [dot for y in lines for dot in _between((self.left, y), (self.right, y))]


@dataclass(frozen=True)
class Labels:
    """Places of a panel's words.

    Attributes:
        texts: by series, of each text one of BESIDE.
        names: by level, one of ALONG, and whether it is above its line, or left of an upright one.
    """

    texts: list[list[str]]
    names: list[tuple[float, bool]]


def labels(panel: "Panel") -> Labels:
    """Baselines are named first: their names may go far, texts stay with their points."""
    scale = _Scale(panel)
    dots = [*_legend(panel), *(dot for series in panel.series for dot in scale.dots(series))]
    lines = [scale.line(level) for level in panel.levels]
    names, texts = [], []
    for number, level in enumerate(panel.levels):
        others = [dot for other, line in enumerate(lines) if other != number for dot in line]
        shares = ALONG if not level.upright else (0.98, 0.02)
        boxes = {(share, above): scale.name(level, share, above) for above in (True, False) for share in shares}
        names.append(min(boxes, key=lambda each: boxes[each].hides([*dots, *others])))  # noqa: B023
        dots += boxes[names[-1]].dots()
    dots += [dot for line in lines for dot in line]
    for series in panel.series:
        texts.append(list[str]())
        for at, text in zip(scale.points(series), series.text or (), strict=False):
            beside = {place: _beside(at, text, place) for place in BESIDE}
            texts[-1].append(min(BESIDE, key=lambda each: beside[each].hides(dots)))  # noqa: B023
            dots += beside[texts[-1][-1]].dots() if text else []
    return Labels(texts, names)


def anchor(share: float, begin: T, middle: T, end: T) -> T:
    """What of a name is at this share of its baseline."""
    return begin if share < 0.1 else end if share > 0.9 else middle


def _beside(at: Point, text: str, place: str) -> Box:
    upright, side = place.split()
    width = DIGIT * len(text)
    left = at[0] + {"right": APART, "left": -APART - width, "center": -width / 2}[side]
    bottom = at[1] + {"top": APART, "bottom": -APART - LINE, "middle": -LINE / 2}[upright]
    return Box(left, bottom, left + width, bottom + LINE)


def _legend(panel: "Panel") -> list[Point]:
    """Where matplotlib has it, as far as that is known beforehand."""
    names = [series.name for series in panel.series if series.legend]
    upright, _, side = panel.legend.partition(" ")
    if not names or not side:
        return []
    width = panel.columns * (LETTER * max(map(len, names)) + SAMPLE)
    height = 1.25 * LINE * -(-len(names) // panel.columns) - 4
    left = {"left": RIM, "right": ROOM - width - RIM, "center": (ROOM - width) / 2}[side]
    bottom = RIM if upright == "lower" else ROOM - height - RIM
    return [
        dot
        for y, _ in _between((bottom, 0.0), (bottom + height, 0.0))
        for dot in _between((left, y), (left + width, y))
    ]


class _Scale:
    """A panel in points from the lower left of its axes."""

    def __init__(self, panel: "Panel") -> None:
        self.panel, self.bars = panel, [series for series in panel.series if series.kind == "bar"]
        self.names, self.wide = panel.names, 0.8 / max(1, len(self.bars))
        self.piled: dict[tuple[float, bool], float] = {}  # ends of the stacks so far
        room = 0.4 if any(series.kind in ("bar", "stack") for series in panel.series) else 0.0
        x = [each for series in panel.series for each in self.places(series)]
        x += [self.place(each) for series in panel.series for each in _numbers(series.x_low, series.x_high)]
        y = [each for series in panel.series for each in _numbers(series.y, series.low, series.high)]
        x += [self.place(level.at) for level in panel.levels if level.upright]
        y += _numbers(*([level.at, level.low, level.high] for level in panel.levels if not level.upright))
        low, high = (None if end is None else self.place(end) for end in panel.x_range)
        self.x_ends = _span([each + end for each in x for end in (-room, room)], (low, high))
        self.y_ends = _span(y if not room else [*y, 0.0], panel.y_range)

    def place(self, x: Any) -> float:
        return float(self.names.index(x)) if isinstance(x, str) else log2(x) if self.panel.x_log else float(x)

    def places(self, series: "Series") -> list[float]:
        shift = (self.bars.index(series) - (len(self.bars) - 1) / 2) * self.wide if series.kind == "bar" else 0.0
        return [self.place(each) + shift for each in series.x]

    def at(self, place: float, y: Any) -> Point:
        (left, right), (low, high) = self.x_ends, self.y_ends
        share = (float("nan" if y is None else y) - low) / (high - low)
        return ROOM * (place - left) / (right - left), ROOM * share

    def points(self, series: "Series") -> list[Point]:
        return [self.at(x, y) for x, y in zip(self.places(series), series.y, strict=True)]

    def dots(self, series: "Series") -> list[Point]:
        """What is drawn of a series, but for bands."""
        found, ends = list[Point](), list(zip(self.places(series), series.y, strict=True))
        if series.kind != "line":
            for (x, _), *whisker in zip(ends, series.low or (), series.high or (), strict=False):
                found += self.between(*((x, y) for y in whisker))
            for (_, y), *whisker in zip(ends, series.x_low or (), series.x_high or (), strict=False):
                found += self.between(*((self.place(x), y) for x in whisker))
        if series.kind in ("bar", "stack"):
            for x, y in ends:
                bottom = self.piled.get((x, y < 0), 0.0) if series.kind == "stack" else 0.0
                self.piled[x, y < 0] = bottom + y
                for side in (x - 0.4 * self.wide, x, x + 0.4 * self.wide):
                    found += self.between((side, bottom), (side, bottom + y))
            return found
        if series.kind == "line":
            found += [dot for pair in pairwise(ends) for dot in self.between(*pair)]
        rim = [(x, y) for x in (-MARKER, 0.0, MARKER) for y in (-MARKER, 0.0, MARKER)]
        return found + [(x + right, y + up) for x, y in self.points(series) for right, up in rim if series.marker]

    def between(self, start: tuple[float, Any], end: tuple[float, Any]) -> list[Point]:
        return _between(self.at(*start), self.at(*end))

    def line(self, level: "Level") -> list[Point]:
        if level.upright:
            x = self.at(self.place(level.at), 0.0)[0]
            return _between((x, 0.0), (x, ROOM))
        y = self.at(0.0, level.at)[1]
        return _between((0.0, y), (ROOM, y))

    def name(self, level: "Level", share: float, above: bool) -> Box:
        long = LETTER * len(level.name)
        begin = share * ROOM - anchor(share, 0.0, 0.5, 1.0) * long
        if level.upright:
            left = self.at(self.place(level.at), 0.0)[0] - (LINE + 1 if above else -1)
            return Box(left, begin, left + LINE, begin + long)
        bottom = self.at(0.0, level.at)[1] + (1 if above else -1 - LINE)
        return Box(begin, bottom, begin + long, bottom + LINE)


def _numbers(*columns: Sequence[Any] | None) -> list[float]:
    return [float(each) for column in columns for each in column or () if each is not None and isfinite(each)]


def _span(values: Sequence[float], asked: "Ends") -> tuple[float, float]:
    """Ends of an axis: as asked, else with the room around the values that matplotlib leaves."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = 0.05 * (high - low) or 0.5
    return float(low - room if asked[0] is None else asked[0]), float(high + room if asked[1] is None else asked[1])


def _between(start: Point, end: Point) -> list[Point]:
    """Dots for a straight line; none where an end is no number."""
    (x, y), (to_x, to_y) = start, end
    long = max(abs(to_x - x), abs(to_y - y))
    if not isfinite(long):
        return []
    count = max(1, round(long / STEP))
    return [(x + i / count * (to_x - x), y + i / count * (to_y - y)) for i in range(count + 1)]
