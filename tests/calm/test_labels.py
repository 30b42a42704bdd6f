"""Words on a panel stand where they hide least, in both drawings alike."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from calm.report_plots.interactive import interactive
from calm.report_plots.labels import ALONG, BESIDE, labels
from calm.report_plots.panels import Level, Panel, Series, draw_panels

BEGIN, END = ALONG[:2]


def panel(series: Sequence[Series], *levels: Level, **more: Any) -> Panel:
    return Panel("title", "x (s)", "y (%)", series, levels, **{"legend": "none", **more})


def line(x: Sequence[Any], y: Sequence[Any], *interval: Sequence[Any], **more: Any) -> Series:
    return Series("a", x, y, *interval, **more)


def test_a_baseline_is_named_where_nothing_is() -> None:
    level = Level("full depth", 1.0)
    far = line([0, 1, 2], [5, 6, 5])
    assert labels(panel([far], level)).names == [(BEGIN, True)]
    assert labels(panel([far, line([0, 0.3], [1.1, 1.1])], level)).names == [(END, True)]
    assert labels(panel([far, line([0, 2], [1.1, 1.1])], level)).names == [(BEGIN, False)]
    ends = [line(x, [y, y]) for x in ([0, 0.3], [1.7, 2]) for y in (0.9, 1.1)]
    assert labels(panel([far, *ends], level, y_range=(0, 6.5))).names == [(0.5, True)]
    rim = panel([line([1, 4], [5, 6])], Level("full depth", 1, upright=True), x_range=(1, 4))
    assert labels(rim).names == [(END, False)]
    beside = [line([2, 9], [0, 6]), line([4.7, 4.7], [4, 6])]
    assert labels(panel(beside, Level("full depth", 5, upright=True))).names == [(BEGIN, True)]


def test_bars_whiskers_and_a_legend_are_in_the_way() -> None:
    bars = Series("a", ["one", "two"], [2.0, 0.4], kind="bar")
    assert labels(panel([bars], Level("full depth", 1.0))).names == [(END, True)]
    stacks = [Series(name, ["one", "two"], [1.0, 0.2], kind="stack") for name in "ab"]
    assert labels(panel(stacks, Level("full depth", 1.5), y_range=(0, 3))).names == [(END, True)]
    point = Series("a", [0.1, 8.0], [3.0, 3.0], [0.0, 2.9], [4.0, 3.1], kind="points")
    assert labels(panel([point], Level("full depth", 1.0))).names == [(END, True)]
    wide = Series("a", [2.0, 8.0], [1.05, 3.0], x_low=[0.0, 8.0], x_high=[3.0, 8.0], kind="points")
    assert labels(panel([wide], Level("full depth", 1.0))).names == [(END, True)]
    high = line([0, 1], [0, 1])
    for legend, place in (("upper left", (END, True)), ("upper right", (BEGIN, True)), ("best", (BEGIN, True))):
        assert labels(panel([high], Level("top", 1.4), legend=legend, y_range=(0, 1.5))).names == [place]


def test_texts_of_points_that_lie_together_stand_apart() -> None:
    both = [line([1, 2, 3], [1, 2, 3], text=["a", "b", "long"]), line([1.01, 2.01, 3.01], [1, 2, 3], text=list("def"))]
    first, second = labels(panel(both)).texts
    assert all(one != other for one, other in zip(first, second, strict=True)) and {*first, *second} <= {*BESIDE}
    assert labels(panel([line([1, 2], [2, 1])])).texts == [[]]
    assert first[-1].endswith("left")  # at the right rim


@pytest.mark.parametrize("gap", [math.nan, None])
def test_what_is_no_number_is_in_nobodys_way(gap: Any) -> None:
    some = line([1, 2, 3], [1, gap, 3], [0.9, gap, 2.9], [1.1, gap, 3.1], text=["a", "b", "c"])
    found = labels(panel([some], Level("full depth", 1.0)))
    assert len(found.texts[0]) == 3 and found.names
    assert labels(panel([line([], [])], Level("full depth", 1.0))).names == [(BEGIN, True)]


def test_a_logarithmic_axis_is_measured_by_its_logarithms() -> None:
    crowd = line([1, 2, 4], [1.1, 1.1, 1.1])
    shown = panel([crowd], Level("full depth", 1.0), x_log=True, x_range=(1, 64), y_range=(0, 5))
    assert labels(shown).names == [(END, True)]
    (ax,) = draw_panels([shown])
    assert ax.get_xlim() == (1, 64)
    assert interactive([shown]).layout.xaxis.range == (0, pytest.approx(math.log10(64)))


def test_both_drawings_put_words_there() -> None:
    texts = line([1, 2, 3], [1, 2, 1], text=["a", "b", "c"])
    levels = (Level("flat", 1.05), Level("upright", 2.5, upright=True))
    shown = panel([texts], *levels)
    found = labels(shown)
    figure = interactive([shown])
    assert list(figure.data[0].textposition) == found.texts[0]
    (ax,) = draw_panels([shown])
    drawn = {text.get_text(): text for text in ax.texts}
    said = {note.text: note for note in figure.layout.annotations}
    (flat, above), (upright, left) = found.names
    assert (drawn["flat"].xy, said["flat"].x, said["flat"].xref) == ((flat, 1.05), flat, "x domain")
    assert (drawn["upright"].xy, said["upright"].y, said["upright"].yref) == ((2.5, upright), upright, "y domain")
    assert drawn["flat"].get_va() == said["flat"].yanchor == ("bottom" if above else "top")
    assert drawn["upright"].get_ha() == said["upright"].xanchor == ("right" if left else "left")
    assert drawn["upright"].get_rotation() == 90 and said["upright"].textangle == -90


def test_what_belongs_to_hollow_points_has_their_colour_on_a_page() -> None:
    hollow = line([1, 2], [1, 2], [0, 1], [2, 3], kind="points", color="#d55e00", hollow=True, text=["a", "b"])
    (drawn,) = interactive([panel([hollow])]).data
    assert drawn.marker.color == "white" and drawn.error_y.color == drawn.textfont.color == "#d55e00"
