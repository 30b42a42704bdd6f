"""The figure of a load from made-up records: which points there are, how they are marked, and what is drawn."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calm.plotting import COLORS, plot_load
from eval.load_figures import draw_figure, figure_rows, headline

RATES = (1.0, 2.0, 4.0, 8.0, "inf")
WAYS = {"full": 1.0, "static=4": 0.62, "tolerance=0.05": 0.7, "threshold=0.8": 0.75}


def record(rate: float | str, way: str) -> dict[str, Any]:
    """Queueing by a formula: a server of ten requests a second, less for deeper ways."""
    service = 0.1 * WAYS[way]
    load = min(0.97, float(rate) * service) if rate != "inf" else 0.99
    wait = 1000 * service * load / (1 - load)
    tpot = 12 * WAYS[way] * (1 + load)
    told: dict[str, Any] = {"median_tpot_ms": tpot, "p99_tpot_ms": 1.8 * tpot}
    inner = {
        "median_ttft_ms": 20 + wait, "p99_ttft_ms": 40 + 4 * wait,
        "median_e2el_ms": 20 + wait + 25 * tpot, "p99_e2el_ms": 40 + 4 * wait + 60 * tpot,
    }  # fmt: skip
    return {
        "rate": rate, "way": way, "completed": 200, "failed": 0, "errors": {}, "tokens_from": {"usage": 200},
        "client_late": False, "max_client_lag_ms": 3.0, "p99_client_lag_ms": 1.0,
        "output_throughput": 25 * min(float(rate), 0.98 / service), "from_scheduled": inner, "from_sent": inner, **told,
    }  # fmt: skip


def made_up(ways: tuple[str, ...] = tuple(WAYS), rates: tuple[float | str, ...] = RATES) -> dict[str, Any]:
    return {
        "cells": [record(rate, way) for rate in rates for way in ways],
        "config": {"n": 200, "burstiness": 1.0, "percentiles": [50.0, 99.0]},
        "served_model": "debian", "prompts": "debian, test split", "client_late": False,
    }  # fmt: skip


def test_every_cell_has_a_point_in_every_panel() -> None:
    rows = figure_rows(made_up())
    panels = ["time to first token", "time per output token", "whole answer", "throughput"]
    assert list(dict.fromkeys(row["panel"] for row in rows)) == panels
    assert len(rows) == len(panels) * len(RATES) * len(WAYS)
    first = rows[0]
    assert (first["way"], first["rate"], first["marked"], first["label"]) == ("full", 1.0, False, "ms (dashed: p99)")
    assert first["value"] == made_up()["cells"][0]["from_scheduled"]["median_ttft_ms"]
    assert [row["rate"] for row in rows if row["panel"] == "throughput"][-1] == float("inf")


def test_points_are_marked_where_something_was_wrong_and_left_out_where_nothing_came() -> None:
    summary = made_up(("full",), (1.0, 2.0, 4.0))
    summary["cells"][0]["failed"] = 3
    summary["cells"][1]["client_late"] = True
    summary["cells"][2]["median_tpot_ms"] = None  # answers of one token
    rows = figure_rows(summary)
    assert [row["marked"] for row in rows if row["panel"] == "throughput"] == [True, True, False]
    assert len([row for row in rows if row["panel"] == "time per output token"]) == 2
    summary["cells"][0]["completed"] = 0
    assert {row["rate"] for row in figure_rows(summary)} == {2.0, 4.0}


def test_the_headline_says_what_was_sent() -> None:
    summary = made_up()
    assert headline(summary) == (
        "debian: 200 requests a point, debian, test split; Poisson arrivals, latencies from when a request was due"
    )
    summary["config"]["burstiness"], summary["client_late"] = 0.5, True
    assert "burstiness 0.5" in headline(summary) and headline(summary).endswith("(the client was late)")


def test_lines_are_drawn_in_the_colours_of_their_ways() -> None:
    summary = made_up(("full", "static=4"), (1.0, 4.0, "inf"))
    summary["cells"][0]["failed"] = 1
    axes = plot_load(pd.DataFrame(figure_rows(summary)), "title")
    ttft, throughput = axes[0], axes[-1]
    assert len(axes) == 4 and ttft.get_yscale() == "log" and throughput.get_yscale() == "linear"
    assert [tick.get_text() for tick in ttft.get_xticklabels()] == ["1", "4", "all\nat once"]
    medians = [line for line in ttft.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 1]
    assert [line.get_color() for line in medians] == [COLORS["full"], "#7f7f7f"]
    assert list(medians[0].get_xdata()) == [1.0, 4.0]  # all at once stands apart
    points = [line for line in throughput.lines if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() for line in points] == ["white", COLORS["full"], COLORS["full"]]
    legend = throughput.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "full",
        "static=4",
        "some failed, or\nthe client was late",
    ]


def test_ways_of_one_kind_differ_in_colour() -> None:
    rows = figure_rows(made_up(("full",), (1.0, 2.0)))
    other = [{**row, "way": way} for row in rows for way in ("tolerance=0.02", "tolerance=0.05", "plain")]
    axes = plot_load(pd.DataFrame(other))
    legend = axes[-1].get_legend()
    assert legend is not None
    assert len({line.get_color() for line in legend.get_lines()}) == 3


@pytest.mark.parametrize("rates", [RATES, ("inf",), (2.0,)])
def test_one_picture_is_written(rates: tuple[float | str, ...], tmp_path: Path) -> None:
    assert draw_figure(made_up(rates=rates), tmp_path) == ["serving.png"]
    assert (tmp_path / "serving.png").stat().st_size > 20_000


def test_nothing_is_drawn_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = made_up(("full",), (1.0,))
    summary["cells"][0]["completed"] = 0
    assert draw_figure(summary, tmp_path) == [] and "no request was completed" in capsys.readouterr().out
