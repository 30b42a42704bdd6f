"""What a figure shows, said once and drawn twice: by matplotlib here, for a page by plotly (interactive)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .labels import anchor, labels

Kind = Literal["line", "points", "bar", "stack"]
Number = int | float
Ends = tuple[Number | None, Number | None]
WIDTH, HEIGHT = 4.2, 4.2  # of a panel, in inches
# told apart also by readers who see red and green alike (Okabe & Ito), black left to full depth
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
BASELINE = "#7f7f7f"
TICKS = 38  # letters that have room beside each other under a panel


@dataclass(frozen=True)
class Series:
    """Points of one name.

    Attributes:
        x, y: numbers, as many of each; ``x`` may be names, which then stand in the order of the first series.
        low, high: ends of the interval of each y.
        x_low, x_high: ends of the interval of each x.
        kind: ``line`` (its interval is a band), ``points`` and ``bar`` (theirs are whiskers), ``stack``: bars on top
            of each other, those below 0 under it.
        line: ``-``, ``--``, ``:``; of a line.
        text: beside each point.
        hollow: markers that are not filled.
        legend: False leaves its name out.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    low: Sequence[Any] | None = None
    high: Sequence[Any] | None = None
    x_low: Sequence[Any] | None = None
    x_high: Sequence[Any] | None = None
    kind: Kind = "line"
    color: str = PALETTE[0]
    line: str = "-"
    marker: str = "o"
    text: Sequence[str] | None = None
    hollow: bool = False
    legend: bool = True

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{self.name}: {len(self.x)} x for {len(self.y)} y")


@dataclass(frozen=True)
class Level:
    """A baseline across the panel: horizontal at a y, or with ``upright`` vertical at an x."""

    name: str
    at: Number
    low: Number | None = None
    high: Number | None = None
    upright: bool = False
    color: str = BASELINE


@dataclass(frozen=True)
class Panel:
    """Axes with what stands on them; ``x`` and ``y`` are their names with units.

    Attributes:
        x_log: base 2, with the values of the series as ticks.
        x_range, y_range: ends; None: as the data has them.
        legend: where matplotlib puts it (``upper left``, ...); ``none`` leaves it out.
        columns: of the legend.
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    levels: Sequence[Level] = ()
    x_log: bool = False
    x_range: Ends = (None, None)
    y_range: Ends = (None, None)
    legend: str = "best"
    columns: int = 1

    @property
    def names(self) -> list[Any]:
        """Of the x axis, where it has names and no numbers."""
        found = dict.fromkeys(each for series in self.series for each in series.x if isinstance(each, str))
        return list(found)

    @property
    def ticks(self) -> list[float]:
        """All x of a logarithmic axis."""
        return sorted({float(each) for series in self.series for each in series.x})


def panels(count: int) -> Any:
    """Axes side by side in a figure of their own."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained").subplots(1, count, squeeze=False)[0]


def draw_panels(shown: Sequence[Panel], axes: Any = None) -> Any:
    """Axes, one for each panel."""
    axes = panels(len(shown)) if axes is None else axes
    for ax, panel in zip(axes, shown, strict=True):
        _draw(ax, panel)
    return axes


def _draw(ax: Any, panel: Panel) -> None:
    places = {name: float(number) for number, name in enumerate(panel.names)}
    bars = [series for series in panel.series if series.kind == "bar"]
    beneath: dict[tuple[float, bool], float] = {}  # top of each stack, and bottom of what hangs below zero
    words = labels(panel)
    for series, beside in zip(panel.series, words.texts, strict=True):
        x = [places[each] if isinstance(each, str) else float(each) for each in series.x]
        if series.kind == "bar":
            width = 0.8 / len(bars)
            x = [each + (bars.index(series) - (len(bars) - 1) / 2) * width for each in x]
            _bar(ax, series, x, width)
        elif series.kind == "stack":
            ends = [(each, y < 0) for each, y in zip(x, series.y, strict=True)]
            bottoms = [beneath.get(end, 0.0) for end in ends]
            ax.bar(x, series.y, 0.7, bottom=bottoms, color=series.color, label=_label(series))
            beneath |= {end: bottom + y for end, bottom, y in zip(ends, bottoms, series.y, strict=True)}
        else:
            _points(ax, series, x)
        _texts(ax, series, x, beside)
    for level, (share, above) in zip(panel.levels, words.names, strict=True):
        _level(ax, level, share, above)
    if places:
        ax.set_xticks(
            list(places.values()), list(places), rotation=20 if len(places) * max(map(len, places)) > TICKS else 0
        )
    if panel.x_log:
        ax.set_xscale("log", base=2)
        ax.set_xticks(panel.ticks, [f"{each:g}" for each in panel.ticks])
        ax.minorticks_off()
    ax.set_xlim(*panel.x_range)
    ax.set_ylim(*panel.y_range)
    ax.set_title(panel.title, fontsize="medium")
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.grid(axis="y" if places else "both", alpha=0.3)
    if panel.legend != "none" and any(series.legend for series in panel.series):
        ax.legend(frameon=False, fontsize="small", loc=panel.legend, ncols=panel.columns)


def _label(series: Series) -> str | None:
    return series.name if series.legend else None


def _bar(ax: Any, series: Series, x: list[float], width: float) -> None:
    error = _whiskers(series.y, series.low, series.high)
    ax.bar(x, series.y, width, yerr=error, capsize=2, color=series.color, label=_label(series))


def _points(ax: Any, series: Series, x: list[float]) -> None:
    fill = {"markerfacecolor": "white"} if series.hollow else {}
    style: dict[str, Any] = {"color": series.color, "marker": series.marker, "markersize": 4, "label": _label(series)}
    if series.kind == "line":
        ax.plot(x, series.y, series.line, **style, **fill)
        if series.low is not None and series.high is not None:
            ax.fill_between(x, series.low, series.high, color=series.color, alpha=0.15, linewidth=0)
    else:
        ends = {
            "yerr": _whiskers(series.y, series.low, series.high),
            "xerr": _whiskers([float(each) for each in series.x], series.x_low, series.x_high)
            if series.x_low is not None
            else None,
        }
        ax.errorbar(x, series.y, **ends, linestyle="none", capsize=2, **{**style, "markersize": 6}, **fill)


def _whiskers(middle: Sequence[Any], low: Sequence[Any] | None, high: Sequence[Any] | None) -> list[list[float]] | None:
    if low is None or high is None:
        return None
    below = [max(0.0, y - end) for y, end in zip(middle, low, strict=True)]
    return [below, [max(0.0, end - y) for y, end in zip(middle, high, strict=True)]]


def _texts(ax: Any, series: Series, x: list[float], places: Sequence[str]) -> None:
    for at, y, text, place in zip(x, series.y, series.text or (), places, strict=False):
        upright, side = place.split()
        away = ({"right": 4, "left": -4, "center": 0}[side], {"top": 4, "bottom": -4, "middle": 0}[upright])
        ax.annotate(
            text, (at, y), away, textcoords="offset points", fontsize="small", color=series.color,
            va={"top": "baseline", "bottom": "top", "middle": "center"}[upright],
            ha={"right": "left", "left": "right", "center": "center"}[side],
        )  # fmt: skip


def _level(ax: Any, level: Level, share: float, above: bool) -> None:
    span, line = (ax.axvspan, ax.axvline) if level.upright else (ax.axhspan, ax.axhline)
    line(level.at, color=level.color, linewidth=1.0, zorder=0)
    if level.low is not None and level.high is not None:
        span(level.low, level.high, color=level.color, alpha=0.1, linewidth=0, zorder=0)
    where, how = (share, level.at), ("axes fraction", "data")
    ha, va = anchor(share, "left", "center", "right"), "bottom" if above else "top"
    if level.upright:
        where, how = where[::-1], how[::-1]
        ha, va = "right" if above else "left", anchor(share, "bottom", "center", "top")
    rotation = 90 if level.upright else 0
    ax.annotate(level.name, where, xycoords=how, fontsize="small", va=va, ha=ha, rotation=rotation, color=level.color)
