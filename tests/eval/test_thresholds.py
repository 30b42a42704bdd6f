"""The program of thresholds end to end, its words made from made-up numbers, its figure."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calm import BatchDecoder, load
from calm.calibration import ConsistencyLoss
from calm.config import Consistency, DecoderName, Head, Measure, Schedule
from calm.data import load_corpus
from calm.errors import CalmError, ConfigError, DataError
from calm.policies import Confident, Full
from calm.report_plots import draw_panels, panels_of
from calm.report_plots.interactive import interactive
from calm.thresholds import ThresholdSchedule
from eval import thresholds
from eval.said.thresholds import said
from eval.thresholds_decode import Curve, Points
from eval.thresholds_rows import rows_of

from .folders import LENGTH, jsonl_settings, random_folder, write_jsonl
from .threshold_points import DECAYING, LAYERS, SOFTMAX, STATE, THIN, config_of, made_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("thresholds"))


def test_the_program_and_a_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, answered, calls = config_of(folder), Points.answered, [0]

    def interrupted(points: Points, *asked: Any) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return answered(points, *asked)

    monkeypatch.setattr(Points, "answered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thresholds.run(config, tmp_path)
    assert thresholds.run(config, tmp_path) == 0
    count = 1 + (LAYERS - 1) + 3 * 3  # full depth, static depths, three curves
    assert calls[0] == count + 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert thresholds.run(config_of(folder, splits=9), tmp_path) == 0 and calls[0] == count + 1  # from what is kept
    assert summary["figures"] == ["thresholds.png", "thresholds.pdf"] and summary["failed"] == {}
    kept = pd.read_parquet(tmp_path / "rows.parquet")
    assert len(kept) == count and {len(each) for each in kept["rouge_l"]} == {sum(summary["articles"].values()) - 30}

    model = load(folder)
    corpus = load_corpus(jsonl_settings(folder.parent / "rows.jsonl"))
    rows = [*corpus.splits["calibration"], *corpus.splits["test"]]
    first = len(corpus.splits["calibration"])
    full = BatchDecoder(model)(rows, Full())
    loss = ConsistencyLoss(Consistency.risk, rows, full)
    curve = [row for row in summary["rows"] if row["kind"] == "curve" and row["schedule"] == "decaying"]
    assert [row["index"] for row in curve] == [0, 1, 2, 3] and curve[0]["threshold"] == 1.0
    for row in curve[1:]:
        schedule = ThresholdSchedule(row["threshold"], Schedule.decaying, 4.0, LENGTH)
        traces = BatchDecoder(model)(rows, Confident(Measure.softmax, schedule))
        losses = loss(traces)
        assert row["calibration_loss"] == pytest.approx(losses[:first].mean())
        assert row["loss"] == pytest.approx(losses[first:].mean())
        layers = [layer for trace in traces[first:] for layer in trace.emission_layers]
        assert row["layers_skipped"] == pytest.approx(1 - np.mean(layers) / LAYERS)
    assert len(said(summary)) == 3


def test_heads_are_the_engines_and_a_point_that_fails_ends_its_curve(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        folder, measures=[Measure.softmax], heads=[Head.full, Head.candidates], schedules=[Schedule.constant],
        decoder=DecoderName.engine, head_k=4, n=40,
    )  # fmt: skip
    at = Points.at

    def failing(points: Points, curve: Curve, threshold: float) -> list[dict[str, Any]]:
        if curve.head is Head.full and threshold == points.grid(curve)[0]["thresholds"][2]:
            raise CalmError("no")
        return at(points, curve, threshold)

    monkeypatch.setattr(Points, "at", failing)
    assert thresholds.run(config, tmp_path) == thresholds.UNFINISHED
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == {"curve-softmax-constant-full-2": "no"}
    found = pd.DataFrame(row for row in summary["rows"] if row["kind"] == "curve")
    assert found.groupby("head")["index"].max().to_dict() == {"full": 1, "candidates": 3}
    assert {row["of"] for row in summary["rows"] if row["kind"] == "difference"} <= {"head", "static"}
    monkeypatch.setattr(Points, "answered", lambda *_: (_ for _ in ()).throw(CalmError("nothing")))
    with pytest.raises(CalmError, match="nothing"):
        thresholds.run(config_of(folder, n=41), tmp_path)


def test_what_cannot_be_asked_is_one_line(folder: Path, tmp_path: Path) -> None:
    for wrong, why in (
        ({"measures": []}, "measures"),
        ({"tolerances": [0.0]}, "tolerances"),
        ({"schedules": [Schedule.auto]}, "auto"),
        ({"heads": [Head.candidates]}, "full is what the others"),
        ({"heads": [Head.full, Head.screened]}, "need decoder=engine"),
        ({"n": 0}, "n"),
        ({"splits": 0}, "splits"),
    ):
        with pytest.raises(ConfigError, match=why):
            config_of(**wrong)  # type: ignore[arg-type]
    model = load(folder)
    with pytest.raises(DataError, match="at least two articles"):
        thresholds.articles_of_splits(config_of(n=1), model)
    model.settings.has_classifier = False
    assert thresholds.known_measures(config_of(measures=[Measure.classifier, Measure.state]), model) == [Measure.state]
    with pytest.raises(ConfigError, match="has no classifier"):
        thresholds.known_measures(config_of(measures=[Measure.classifier]), model)
    with pytest.raises(DataError):
        empty = jsonl_settings(write_jsonl(tmp_path / "rows.jsonl", []))
        thresholds.articles_of_splits(config_of(data=empty), model)


def summary_of(losses: dict[Curve, list[float]], **changes: Any) -> dict[str, Any]:
    config = config_of(tolerances=[0.05, 0.1, 0.2], **changes)
    rows = rows_of(made_up(losses, 2000, config))
    return {
        "rows": rows, "tolerances": config.tolerances, "error_prob": 0.05, "num_layers": LAYERS,
        "articles": {"calibration": 1000, "test": 1000},
    }  # fmt: skip


def test_words_follow_the_numbers() -> None:
    better, worse = [0.01, 0.02, 0.5], [0.01, 0.5, 0.5]
    for softmax, state, winner, loser in ((better, worse, "softmax", "state"), (worse, better, "state", "softmax")):
        first, last = said(summary_of({SOFTMAX: softmax, STATE: state}))
        assert f"{winner} skips most, and more than each of the others" in first
        assert f"{winner} skips 50.0 % [50.0, 50.0]" in first and f"{loser} skips 25.0 %" in first
        assert f"{winner} +0.18" in first and "better" in first and "1000 articles" in first
        assert "softmax at 0.1: 5 of 5; " in last and "all at least 95 %" in last and "an illustration" in last
    tie, *_ = said(summary_of({SOFTMAX: better, STATE: better}))
    assert "softmax skips most, but cannot be told apart from state" in tie
    bad, halves = said(summary_of({SOFTMAX: [0.3, 0.4], STATE: worse}))
    assert "softmax skips nothing (only full depth is certified)" in bad
    assert "softmax at 0.1: 5 of 5 (5 certified full depth alone, which loses nothing)" in halves
    none, _ = said(summary_of({SOFTMAX: [0.3], STATE: [0.3]}))
    assert "skips most" not in none and "static depths" not in none
    low = said(summary_of({SOFTMAX: [0.2, 0.06, 0.5], STATE: [0.08, 0.5]}))[0]
    assert "softmax skips nothing" in low


def test_words_of_schedules_and_heads_and_of_splits_that_did_not_hold() -> None:
    more, fewer = [0.01, 0.02, 0.5], [0.01, 0.5]
    _, variants, _ = said(summary_of({SOFTMAX: fewer, DECAYING: more, THIN: fewer}))
    assert "softmax, decaying less constant: +25.0 [+25.0, +25.0] points of layers skipped, more, and" in variants
    assert (
        "candidates head less full head: +0.0 [+0.0, +0.0] points of layers skipped, cannot be told apart" in variants
    )
    _, variants, _ = said(summary_of({SOFTMAX: more, DECAYING: fewer}))
    assert (
        "-25.0 [-25.0, -25.0] points of layers skipped, fewer, and +0.0" in variants and "ROUGE-L, better" in variants
    )
    summary = summary_of({SOFTMAX: more, STATE: more})
    for row in summary["rows"]:
        if row["kind"] == "splits" and row["measure"] == "state" and row["tolerance"] == 0.2:
            row["held"] = 4
    assert "state at 0.2: 4 of 5; 1 of these below 95 %" in said(summary)[-1]


def test_the_figure_has_baselines_units_and_certified_points() -> None:
    summary = summary_of({SOFTMAX: [0.01, 0.02, 0.15], DECAYING: [0.02, 0.08, 0.3], STATE: [0.01], THIN: [0.02, 0.3]})
    panels = panels_of("thresholds", summary)
    axes = draw_panels(panels)
    titles = [ax.get_title() for ax in axes]
    assert [title.partition(" (")[0] for title in titles[:3]] == ["measures", "schedules", "heads of softmax"]
    assert titles[3] == "overlapping splits: an illustration"
    for ax, panel in zip(axes[:3], panels, strict=False):
        assert ax.get_xlabel() == "decoder layers skipped (%)" and "95 % interval" in ax.get_ylabel()
        assert any(text.get_text() == "full depth" for text in ax.texts)
        assert any(series.name == "static depth" and series.hollow for series in panel.series)
    marked = {text for series in panels[0].series if series.text for text in series.text}
    assert marked == {"0.05, 0.1", "0.2", "0.05, 0.1, 0.2"}
    assert [text.get_text() for text in axes[1].get_legend().get_texts()][:2] == [
        "softmax, constant", "softmax, decaying",
    ]  # fmt: skip
    assert any(text.get_text() == "95 %" for text in axes[3].texts)
    assert interactive(panels).data
    alone = panels_of("thresholds", summary_of({STATE: [0.01]}))
    assert len(alone) == 2
