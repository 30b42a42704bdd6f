"""Figures show the numbers they are given, in the colours of their rows."""

import pandas as pd
from matplotlib.figure import Figure

from calm.config import Measure
from calm.plotting import COLORS, color_of, plot_exit_layers, plot_speed_quality


def test_exit_layers_is_one_line_a_row_in_percent() -> None:
    rows = [("softmax", 1, 0.25), ("softmax", 2, 0.75), ("softmax@0.85", 1, 0.5), ("softmax@0.85", 2, 0.5)]
    axes = plot_exit_layers(pd.DataFrame(rows, columns=["row", "layer", "share"]))
    lines = axes.get_lines()
    assert [line.get_label() for line in lines] == ["softmax", "softmax@0.85"]
    assert list(lines[0].get_ydata()) == [25.0, 75.0]
    assert [line.get_linestyle() for line in lines] == ["-", "--"]
    assert {line.get_color() for line in lines} == {COLORS["softmax"]}
    assert list(axes.get_xticks()) == [1, 2]


def test_speed_against_quality_fills_what_is_certified_and_leaves_out_what_decodes_nothing() -> None:
    columns = ["row", "layers_skipped", "rouge_l", "rouge_l_low", "rouge_l_high", "tolerance"]
    rows = [
        ("lead-1", None, 0.3, 0.2, 0.4, None),
        ("full", 0.0, 0.6, 0.55, 0.65, None),
        ("softmax", 0.5, 0.59, 0.54, 0.64, 0.05),
    ]
    given = Figure().subplots()
    axes = plot_speed_quality(pd.DataFrame(rows, columns=columns), given)
    assert axes is given
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["full", "softmax (certified)"]
    full, softmax = (handle.lines[0] for handle in handles)
    assert (softmax.get_xdata()[0], softmax.get_ydata()[0]) == (50.0, 0.59)
    assert full.get_markerfacecolor() == "white"
    assert softmax.get_markerfacecolor() == COLORS["softmax"]


def test_every_measure_has_a_colour_of_its_own() -> None:
    assert len({color_of(measure.value) for measure in Measure}) == len(Measure)
    assert color_of("state@0.95") == color_of("state")
    assert color_of("something else").startswith("#")
