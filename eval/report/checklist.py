"""A line for each panel of a report's figures: what can be computed of how readable it is, and what it says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from calm.report_plots import draw_panels
from calm.report_plots.panels import PALETTE, WIDTH, Panel, Series

from .collect import Found

HALF = 3.25  # inches: half the text of a page, which one panel then has
LEAST = 6.0  # points of the smallest letters there
BASES = ("full", "static", "reference", "random", "own")  # words of a baseline that is a series or a bar
BLACK = "#000000"
MORE = ("#f0e442", "#a6761d")  # beside the palette: Okabe and Ito's yellow, and calm.plotting's brown


@dataclass(frozen=True)
class Check:
    """``name`` of something computed, whether it holds, and what was found."""

    name: str
    holds: bool
    told: str


def checks(panel: Panel) -> list[Check]:
    """All that can be computed of a panel: from what it says, and drawn by itself at its own width."""
    ax = draw_panels([panel])[0]
    ax.figure.draw_without_rendering()
    return [_axes(panel, ax), _title(panel, ax), _baseline(panel), _colors(panel), _apart(panel), _letters(ax)]


def _axes(panel: Panel, ax: Any) -> Check:
    """Both are named (names along x may speak for themselves), and the names have room."""
    width, height = ax.figure.bbox.width, ax.figure.bbox.height
    named = bool(panel.y and (panel.x or panel.names))
    room = ax.xaxis.label.get_window_extent().width <= width and ax.yaxis.label.get_window_extent().height <= height
    told = f"{panel.x or 'names'} | {panel.y}" + ("" if room else " (longer than the panel)")
    return Check("axes", named and room, told)


def _title(panel: Panel, ax: Any) -> Check:
    share = ax.title.get_window_extent().width / ax.figure.bbox.width
    return Check("title", bool(panel.title) and share <= 1, f"{100 * share:.0f} % of the panel's width")


def _baseline(panel: Panel) -> Check:
    names = [level.name for level in panel.levels]
    shown = [*(series.name for series in panel.series), *map(str, panel.names)]
    names += [name for name in shown if any(word in name.lower() for word in BASES)]
    names += [series.name for series in panel.series if series.color == BLACK and series.name not in names]
    return Check("baseline", bool(names), ", ".join(dict.fromkeys(names)) or "none")


def _colors(panel: Panel) -> Check:
    colors = {series.color for series in panel.series} - {*PALETTE, *MORE}
    strange = {color for color in colors if len({color[1:3], color[3:5], color[5:]}) > 1}  # black and greys are safe
    return Check(
        "colours", not strange, "of the palette" if not strange else f"not of it: {', '.join(sorted(strange))}"
    )


def _apart(panel: Panel) -> Check:
    """Series of a panel are told apart without their colours too."""
    alike = [
        f"{one.name} and {other.name}"
        for one, other in combinations(panel.series, 2)
        if one.legend and other.legend and one.name != other.name and not told_apart(one, other)
    ]
    return Check("without colours", not alike, "told apart" if not alike else f"alike: {'; '.join(alike)}")


def told_apart(one: Series, other: Series) -> bool:
    """By marker, line or filling; bars by their place; points by the only name they stand at."""
    if one.kind != other.kind or one.kind in ("bar", "stack"):
        return True
    if (one.marker, one.hollow) != (other.marker, other.hollow) or (one.kind == "line" and one.line != other.line):
        return True
    return all(isinstance(x, str) for x in (*one.x, *other.x)) and not set(one.x) & set(other.x)


def _letters(ax: Any) -> Check:
    """The smallest, made as small as half a page makes them."""
    legend = ax.get_legend()
    texts = [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()]
    texts += [] if legend is None else legend.get_texts()
    points = min(float(text.get_fontsize()) for text in texts if text.get_text()) * HALF / WIDTH
    return Check("letters", points >= LEAST, f"{points:.1f} pt at half a page")


def failing(panel: Panel) -> list[Check]:
    return [check for check in checks(panel) if not check.holds]


def checklist(found: Sequence[Found]) -> str:
    """Markdown: a table of all panels, ``!`` before what does not hold; what each figure says under it."""
    head = ["figure", "panel", "axes", "baselines", "title", "colours", "without colours", "letters"]
    names = ("axes", "baseline", "title", "colours", "without colours", "letters")
    lines = ["# Figures", "", _line(head), _line(["---"] * len(head))]
    for each in found:
        for panel in each.panels:
            by = {check.name: check for check in checks(panel)}
            cells = [("" if by[name].holds else "! ") + by[name].told for name in names]
            lines.append(_line([each.experiment.name, panel.title, *cells]))
    lines += ["", "## What they say", ""]
    for each in found:
        lines += [f"- {each.experiment.name}: {' '.join(each.said) or each.why or 'nothing'}"]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[Any]) -> str:
    escaped: Callable[[Any], str] = lambda cell: str(cell).replace("|", "\\|").replace("\n", " ")  # noqa: E731
    return f"| {' | '.join(map(escaped, cells))} |"
