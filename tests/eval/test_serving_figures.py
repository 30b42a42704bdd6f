"""Figures 1 and 2 from a record: which bars there are, what stands on them, and what the picture shows."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calm.plotting import COLORS, plot_serving
from eval.serving_figures import LATENCY, PAPER_PANEL, THROUGHPUT, cases, draw_figure, figure_rows, headline, note

FULL_S, PER_LAYER = 0.004, 0.0005
MEASURES = {"softmax": (3.7, 0.0012), "state": (3.5, 0.0002), "classifier": (2.7, 0.0002)}


def entry(batch: int, ours: str, seconds: float, **more: Any) -> dict[str, Any]:
    seconds *= 1 + 0.12 * batch
    rate = batch / seconds
    return {
        "ours": ours, "name": ours, "measure": None, "head": "full", "rule": "own", "trace": None,
        "source_tokens": 128, "batch": batch,
        "tokens_per_s": 0.93 * rate, "inner_token_latency": seconds, "concurrency": 0.93 * batch, **more,
    }  # fmt: skip


def made_up(batches: tuple[int, ...] = (1, 8, 32), trained: bool = False, noisy: bool = False) -> dict[str, Any]:
    """A record in the form of eval.throughput's, by a formula."""
    cells = []
    for batch in batches:
        entries = [entry(batch, "full", FULL_S + 8 * PER_LAYER), entry(batch, "static", FULL_S + 4 * PER_LAYER)]
        for trace in ("tight", "wide"):
            for measure, (depth, check) in MEASURES.items():
                for place, rule in enumerate(("own", "compact", "sync")):
                    mates = 0 if batch == 1 else place % 2 - 0.5
                    exit_s = FULL_S + depth * (PER_LAYER + check) - mates * 0.0008
                    static = entry(batch, "static", FULL_S + depth * PER_LAYER)
                    labels = {"measure": measure, "rule": rule, "trace": trace, "static": static}
                    entries.append(entry(batch, "exit", exit_s, **labels))
        cells.append({"source_tokens": 128, "batch": batch, "entries": entries})
    model = {"name": "small", "paper": "t5-v1_1-small", "weights": "trained" if trained else "random"}
    return {"cells": cells, "model": model, "noisy": noisy, "config": {"dtype": "int8", "threads": 1}}


def test_the_papers_panel_comes_first_and_every_batch_has_one() -> None:
    rows = figure_rows(made_up(), THROUGHPUT, 128, "tight")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    assert panels == [PAPER_PANEL, "ours: batch 1", "ours: batch 8", "ours: batch 32"]
    paper = [(row["row"], row["value"]) for row in rows if row["panel"] == PAPER_PANEL]
    assert paper == [("full", 1046.47), ("softmax", 1081.04), ("state", 1165.73), ("classifier", 1065.13)]
    ours = [row for row in rows if row["panel"] == "ours: batch 8"]
    assert [(row["row"], row["rule"]) for row in ours[:4]] == [
        ("full", None), ("softmax", "own"), ("softmax", "compact"), ("softmax", "sync")
    ]  # fmt: skip
    assert len(ours) == 10 and ours[0]["static"] is None and ours[1]["static"] > 0


def test_bars_say_their_value_their_ratio_and_how_many_decode_at_once() -> None:
    summary = made_up((1,))
    full, softmax = figure_rows(summary, LATENCY, 128, "wide")[4:6]
    assert full["value"] == pytest.approx(1000 * 0.008 * 1.12) and full["note"].endswith("\n@ 0.9")
    assert "×1." in softmax["note"] and softmax["value"] == pytest.approx(1000 * (0.004 + 3.7 * 0.0017) * 1.12)
    paper = figure_rows(summary, LATENCY, 128, "wide")[:2]
    assert [row["note"] for row in paper] == ["234\n@ 245", "75.0  ×0.32\n@ 81"]
    assert note(9.876, None) == "9.88" and note(1234.5, 1.25) == "1234  ×1.25"


def test_a_misprint_of_the_paper_is_told_and_an_unknown_model_has_no_panel() -> None:
    summary = made_up()
    summary["model"]["paper"] = "t5-v1_1-base"
    assert figure_rows(summary, THROUGHPUT, 128, "tight")[1]["note"] == "1178  ×1.05\n(printed: 1778)"
    summary["model"]["paper"] = "debian_tiny"
    assert figure_rows(summary, THROUGHPUT, 128, "tight")[0]["panel"] == "ours: batch 1"


def test_the_headline_says_what_was_measured() -> None:
    text = headline(made_up(noisy=True), THROUGHPUT, 128, "tight")
    assert "random weights" in text and "trace tight" in text and "int8" in text and "noisy machine" in text
    assert "trained" in headline(made_up(trained=True), LATENCY, 128, "live")


def test_one_picture_for_each_source_length_and_trace(tmp_path: Path) -> None:
    summary = made_up((1, 8))
    assert cases(summary) == [(128, "tight"), (128, "wide")]
    names = draw_figure(summary, LATENCY, tmp_path)
    assert names == ["figure2_small_128_tight.png", "figure2_small_128_wide.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)


def test_bars_of_another_head_stand_in_a_group_of_their_own() -> None:
    summary = made_up((8,))
    entries = summary["cells"][0]["entries"]
    softmax = [each for each in entries if each["measure"] == "softmax" and each["trace"] == "tight"]
    entries += [{**each, "head": "candidates"} for each in softmax]
    rows = figure_rows(summary, THROUGHPUT, 128, "tight")
    assert [row["row"] for row in rows[-3:]] == ["softmax\ncandidates"] * 3 and rows[-1]["rule"] == "sync"
    axes = plot_serving(pd.DataFrame(rows), THROUGHPUT.label)
    assert [tick.get_text() for tick in axes[1].get_xticklabels()][-1] == "softmax\ncandidates"
    shown = axes[1].patches[-1].get_facecolor()
    assert tuple(round(255 * part) for part in shown[:3]) == tuple(bytes.fromhex(COLORS["softmax"][1:]))
    few = plot_serving(pd.DataFrame([row for row in rows if row["row"] in ("full", "state")]), THROUGHPUT.label)
    assert axes[0].figure.get_figwidth() > few[0].figure.get_figwidth()


def test_bars_are_drawn_in_the_colours_of_their_measures() -> None:
    rows = figure_rows(made_up((8,)), THROUGHPUT, 128, "tight")
    axes = plot_serving(pd.DataFrame(rows), THROUGHPUT.label)
    paper, ours = axes
    heights = [bar.get_height() for bar in ours.patches]
    assert heights == [row["value"] for row in rows if row["panel"] == "ours: batch 8"]
    assert paper.get_ylabel() == "tokens a second" and ours.get_title() == "ours: batch 8"
    assert [bar.get_facecolor() for bar in ours.patches][0] == (0.0, 0.0, 0.0, 1.0)
    shown = {tuple(round(255 * part) for part in bar.get_facecolor()[:3]) for bar in ours.patches}
    assert shown == {tuple(bytes.fromhex(COLORS[name][1:])) for name in ("full", "softmax", "state", "classifier")}
    legend = ours.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "own", "compact", "sync", "static depth\nof the same mean"
    ]  # fmt: skip
    assert max(heights) < ours.get_ylim()[1]
