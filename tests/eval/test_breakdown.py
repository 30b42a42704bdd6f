"""Phases of a step and the gap to the layers' share: sums written out by hand, and the program on a random model."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calm.config import BatchRule
from calm.errors import CheckpointError, ConfigError
from calm.experiment_config import BreakdownConfig
from calm.report_plots import draw_panels, interactive, panels_of
from eval import breakdown
from eval.breakdown import cross_share, told_of
from eval.breakdown_parts import HOST, ITEMS, PHASES, SMALLER, WAITING, Cost, cost_of, gap, ideal, mixed
from eval.said.breakdown import said
from eval.sessions import Session
from eval.timed_folder import Round, open_timed

from .conftest import TOLERANCE

QUICK: dict[str, Any] = {
    "n": 6, "tolerance": TOLERANCE, "batches": [1, 2], "repeats": 2, "warmups": 0, "allow_noisy": True, "attempts": 1,
    "bootstrap": 20,
}  # fmt: skip
FULL = Cost(dict.fromkeys((*PHASES, HOST), 1.0) | {"layers": 16.0}, row_layers=4 * 8.0, layers=8.0, rows=4)


def quick(certified: Path, **changes: Any) -> BreakdownConfig:
    return BreakdownConfig(str(certified / "model"), **{**QUICK, **changes})


def exits(mean: float, ran: float, **seconds: float) -> Cost:
    """Of four rows: mean layer, rows of layers that ran, and what differs from full depth's phases."""
    return Cost({**FULL.seconds, **seconds}, row_layers=ran, layers=mean, rows=4)


def test_a_gap_item_by_item() -> None:
    mine = exits(2.0, 4 * 5.0, layers=12.0, checks=3.0, backfill=0.25)  # a quarter of the layers; the slowest runs 5
    found = gap(FULL, mine)
    assert ideal(FULL, mine) == FULL.step / 4
    assert found[WAITING] == 4 * (5 - 2) * 0.5  # a row's layer costs 16 / 32
    assert found[SMALLER] == 12.0 - 4 * 5 * 0.5
    assert found["checks"] == 3.0 - 0.25 and found["backfill"] == 0.0
    assert found["head"] == 2 * 0.75 and found["encoder"] == found["packing"] == 0.75
    assert found[HOST] == 3 * 0.75
    assert sum(found.values()) == pytest.approx(mine.step - ideal(FULL, mine))


@pytest.mark.parametrize(("layers", "ran", "seconds"), [(8.0, 32.0, 16.0), (3.3, 13.2, 9.1), (1.0, 32.0, 20.0)])
def test_the_items_add_up_whatever_they_are(layers: float, ran: float, seconds: float) -> None:
    mine = exits(layers, ran, layers=seconds, head=0.1, prefill=7.0)
    assert sum(gap(FULL, mine).values()) == pytest.approx(mine.step - ideal(FULL, mine))
    assert sum(gap(FULL, FULL).values()) == pytest.approx(0.0)


def test_every_phase_is_in_one_item() -> None:
    named = [name for names in ITEMS.values() for name in names]
    assert sorted([*named, "layers"]) == sorted([*PHASES, HOST])


def test_a_step_is_the_runs_seconds_by_its_tokens_times_the_rows() -> None:
    session = Session(requests=3, tokens=20, seconds=9.0, ttft=0.0, tpot=0.0, inner_token_latency=0.0)

    def of(layers: float, choice: float) -> Round:
        return Round(session, {"layers": layers, "choice": choice, "host": 1.0}, steps=6, row_layers=60, layers=3.0)

    cost = cost_of([of(1.0, 1.0), of(5.0, 2.0), of(2.0, 9.0)], rows=4)
    assert cost.seconds["layers"] == pytest.approx(2.0 * 4 / 20)  # medians
    assert cost.seconds[HOST] == pytest.approx((2.0 + 1.0) * 4 / 20)
    assert cost.row_layers == 12.0 and cost.step == pytest.approx((2.0 + 3.0) * 4 / 20)


def test_between_two_depths() -> None:
    found = mixed(exits(2.0, 8.0, layers=4.0), exits(3.0, 12.0, layers=6.0), 0.25)
    assert (found.layers, found.row_layers, found.seconds["layers"], found.seconds["head"]) == (2.25, 9.0, 4.5, 1.0)


def test_the_program_on_a_random_model_goes_on_where_it_was(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, measured = quick(certified), breakdown.broken_down

    def interrupted(config: Any, workload: Any, batch: int) -> Any:
        if batch == 2:
            raise KeyboardInterrupt
        return measured(config, workload, batch)

    monkeypatch.setattr(breakdown, "broken_down", interrupted)
    with pytest.raises(KeyboardInterrupt):
        breakdown.run(config, tmp_path)
    first = next((tmp_path / "trials").glob("*/1.json")).read_text()
    monkeypatch.setattr(breakdown, "broken_down", measured)
    assert breakdown.run(config, tmp_path) == 0
    assert next((tmp_path / "trials").glob("*/1.json")).read_text() == first
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = pd.DataFrame(summary["rows"])
    assert list(rows["way"]) == ["full", "static", "own", "compact"] * 2
    items = [name for name in rows if name.startswith("gap_")]
    assert (rows[items].sum(axis=1) - (rows["step_ms"] - rows["ideal_ms"])).abs().max() < 1e-9
    assert (rows[[f"{phase}_ms" for phase in (*PHASES, HOST)]].sum(axis=1) - rows["step_ms"]).abs().max() < 1e-9
    alone = rows[(rows["batch"] == 1) & rows["way"].isin(["own", "compact"])]
    assert (alone["row_layers"] - alone["layers"]).abs().max() < 1e-9  # nobody to wait for
    together = rows[rows["batch"] == 2].set_index("way")["row_layers"]
    assert together["own"] >= together["compact"] - 1e-9
    told = rows[rows["way"] != "static"]
    for name in ("layer_ratio", "clock_ratio"):
        assert (told[f"{name}_low"] <= told[name] + 1e-9).all()
    assert all(len(rounds) == 2 for rounds in told["rounds"])
    assert summary["figures"] == ["breakdown.png", "breakdown.pdf"] and len(said(summary)) >= 2
    assert pd.read_parquet(tmp_path / "rows.parquet").shape[0] == 8
    assert len(panels_of("breakdown", summary)) == 3


def test_what_of_a_layer_reads_the_source_is_a_share(certified: Path) -> None:
    workload = open_timed(quick(certified))
    engine = workload.engine(2)
    share = cross_share(engine, workload, 2, 2)
    assert (share is None) == (engine.runner_name.value != "native") and 0.0 <= (share or 0.0) < 1.0
    assert not engine.has_work and engine.slots.free == 2  # the bench is gone


def rows_of(mine: Cost, low: float, high: float, batch: int = 8) -> list[dict[str, Any]]:
    ends = {"clock_ratio_low": low, "clock_ratio_high": high, "layer_ratio_low": 3.9, "layer_ratio_high": 4.1}
    return [
        {"batch": batch, "way": "full", **told_of(FULL, FULL, 0.25)},
        {"batch": batch, "way": "static", **told_of(FULL, exits(2.0, 8.0, layers=4.0), 0.25)},
        {"batch": batch, "way": "own", **told_of(FULL, mine, 0.25), **ends},
    ]


def test_what_is_said_follows_the_numbers() -> None:
    slow = exits(2.0, 32.0, layers=16.0, checks=9.0)
    (lost,) = said({"rows": rows_of(slow, 0.7, 0.8), "noisy": False})
    assert "runs 4.00 [3.90, 4.10] times the layers" in lost and "slower than full depth" in lost
    assert "its largest parts: layers run while waiting for the slowest row 48 %, the checks 35 %" in lost
    (won,) = said({"rows": rows_of(exits(2.0, 8.0, layers=4.0), 1.5, 1.7), "noisy": False})
    assert "faster than full depth" in won and "waiting" not in won
    (tied, busy) = said({"rows": rows_of(slow, 0.9, 1.1), "noisy": True})
    assert "not to be told from full depth" in tied and "noisy" in busy
    nothing = Cost({name: value / 8 for name, value in FULL.seconds.items()}, 8.0, 2.0, 4)
    assert "no more than the layers' share" in said({"rows": rows_of(nothing, 7.0, 9.0), "noisy": False})[0]


def test_the_figure_stacks_up_to_the_step_also_with_parts_below_zero() -> None:
    mine = exits(2.0, 8.0, layers=3.0, backfill=0.1)  # layers cheaper than full depth's, backfill below its share
    summary = {"rows": rows_of(mine, 1.0, 2.0)}
    step, on_top = panels_of("breakdown", summary)
    whole = [sum(series.y[number] for series in step.series) for number in range(3)]
    assert whole == pytest.approx([row["step_ms"] for row in summary["rows"]])
    stacked = [series for series in on_top.series if series.kind == "stack"]
    total = [sum(series.y[number] for series in stacked) for number in range(2)]
    assert total == pytest.approx(on_top.series[-1].y) and min(min(series.y) for series in stacked) < 0
    axes = draw_panels([step, on_top])
    tops = [patch.get_y() + patch.get_height() for patch in axes[1].patches]
    assert min(tops) < 0 < max(tops) and "full depth" in [text.get_text() for text in axes[1].texts]
    assert interactive([on_top]).layout.barmode == "relative"


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for wrong, match in (({"rules": [BatchRule.sync]}, "sync"), ({"batches": []}, "batches"), ({"repeats": 0}, "rep")):
        with pytest.raises(ConfigError, match=match):
            BreakdownConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no such folder"):
        breakdown.run(BreakdownConfig(str(tmp_path / "nowhere")), tmp_path)
