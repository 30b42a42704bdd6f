"""What experiments say is made from their numbers: made-up summaries with known winners, both ways."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from calm.report_plots import FIGURES
from eval.said import backfill, length, slowest_row, suitability
from eval.said.words import interval, listed, number

RESULTS = Path(__file__).parents[2] / "results/debian_report"


def row(**values: Any) -> dict[str, Any]:
    """``name=(middle, low, high)`` becomes three columns."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, tuple):
            found |= dict(zip((name, f"{name}_low", f"{name}_high"), value, strict=True))
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("name", sorted(FIGURES.keys() - {"skipdecode"}))
def test_the_records_say_a_few_sentences(name: str) -> None:
    folder = RESULTS if (RESULTS / name).is_dir() else RESULTS.parent  # of the report, or of a run of its own
    summary = json.loads((folder / name / "summary.json").read_text())
    found = import_module(f"eval.said.{name}").said(summary)
    assert 1 <= len(found) <= 6 and all(text.endswith(".") and "nan" not in text for text in found)


def test_backfill_says_who_loses_gains_or_cannot_be_told_apart() -> None:
    work = {"kind": "quality", "fill_of_a_layer": 0.15, "layers": 3.0, "layers_with_fill": 4.0}
    work |= row(equal_rows=(0.5, 0.4, 0.6), to_full=(0.8, 0.7, 0.9))
    gap = "rouge_l_minus_true"
    summary = {
        "num_layers": 8,
        "rows": [
            row(variant="full", **work),
            row(variant="true", **work),
            row(variant="project", **work, **row(**{gap: (-0.001, -0.002, 0.0)})),
            row(variant="copy", **work, **row(**{gap: (-0.02, -0.03, -0.01)})),
            row(variant="mask", **work, **row(**{gap: (0.02, 0.01, 0.03)})),
        ],
    }
    first, second, third = backfill.said(summary)
    assert "project cannot be told apart (-0.0010 [-0.0020, 0.0000]), copy loses" in first
    assert "mask gains ROUGE-L (0.0200 [0.0100, 0.0300])" in first
    assert "15.0 % of a layer's products" in second and "50.0 [40.0, 60.0] %" in third
    clock = [{"kind": "clock", "batch": b, "skipped": k, "of_true": 0.1 * b} for b in (1, 8) for k in (3, 7)]
    assert backfill.said({"num_layers": 8, "rows": clock}) == [
        "Projecting all layers above the first takes, of the time of running them, 10 % at batch 1 and 80 % at batch 8."
    ]
    assert backfill.said({"num_layers": 8, "rows": []}) == []


def test_slowest_row_says_what_waiting_takes() -> None:
    def at(rule: str, layers: float, share: float | None = None) -> dict[str, Any]:
        spans = {"layers": (layers, layers - 0.1, layers + 0.1), "stops_early": (0.25, 0.2, 0.3)}
        return row(row="state", batch=32, hard_share=share, rule=rule, decoded=False, **spans)

    rows = [at("own", 4.0), at("sync", 7.0), at("sync", 5.0, 0.0), at("sync", 7.5, 1.0)]
    first, second, early, third = slowest_row.said({"num_layers": 8, "rows": rows})
    assert "at batch 32 under sync: state 25 [20, 30] %" in early
    assert "batches of 32" in first and "state 7.00 [6.90, 7.10] instead of 4.00 [3.90, 4.10]" in first
    assert second == "Of the layers that could be skipped, waiting takes 75 % of state's."
    assert "cannot be told apart" not in third
    level = slowest_row.said({"num_layers": 8, "rows": [*rows[:3], at("sync", 5.05, 1.0)]})[3]
    assert "which cannot be told apart" in level
    nothing = slowest_row.said({"num_layers": 8, "rows": [at("own", 8.0), at("sync", 8.0)]})[1]
    assert "none of state's, which skips nothing" in nothing
    decoded = [{**at(rule, layers), "decoded": True} for rule, layers in (("sync", 7.1), ("lockstep", 7.4))]
    last = slowest_row.said({"num_layers": 8, "rows": [*rows[:2], *decoded]})[-1]
    assert last == (
        "Decoded in batches of 32, a token runs: state 7.10 [7.00, 7.20] under sync and 7.40 [7.30, 7.50] under "
        "lockstep layers."
    )


def test_length_says_more_fewer_or_neither() -> None:
    def at(by: str, group: int, middle: float) -> dict[str, Any]:
        span = (middle, middle - 0.01, middle + 0.01)
        return row(part="records", row="state", by=by, group=group, layers_skipped=span)

    rows = [at("source", 1, 0.5), at("source", 4, 0.6), at("output", 1, 0.5), at("output", 4, 0.4)]
    first, second = length.said({"rows": rows})
    assert "state 50.0 [49.0, 51.0] and 60.0 [59.0, 61.0] (more)" in first and "(fewer)" in second
    (level,) = length.said({"rows": [at("source", 1, 0.5), at("source", 4, 0.505)]})
    assert "(cannot be told apart)" in level
    told = [
        row(part="predicted", batch=1, source=512, tokens=tokens, shape="small", call_ratio=(ratio, ratio, ratio))
        for tokens, ratio in ((8, 0.9), (64, 1.3))
    ]
    (only,) = length.said({"rows": told})
    assert "from 0.90 [0.90, 0.90] (512 source and 8 answer tokens) to 1.30" in only and "not timed" in only


def test_suitability_says_its_verdict() -> None:
    for because in ("not worth it: too little to skip", "worth certifying thresholds"):
        summary = {
            "num_layers": 8, "verdict": {"says": "x", "because": because}, "layers": [row(agree=(0.7, 0.6, 0.8))],
            "oracle": {"first": row(depth=(2.0, 1.9, 2.1))},
        }  # fmt: skip
        first, second = suitability.said(summary)
        assert first == f"{because.capitalize()}." and "layer 2.00 [1.90, 2.10] of 8" in second


def test_numbers_in_words() -> None:
    assert number(-0.0001, 2) == "0.00" and interval(1.0, None, None) == "1.00"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c" and listed([]) == ""
