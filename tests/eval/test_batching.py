"""Throughput by batch rule and batch size: ratios and errors written out by hand, the program on a random model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calm.calibration import load_artifacts
from calm.config import BatchRule, Measure
from calm.cost import CostTable
from calm.errors import CalibrationError, CalmError, ConfigError, DataError
from calm.experiment_config import BatchingConfig
from calm.report_plots import draw_panels, panels_of
from eval import batching
from eval.batching_simulated import FIGURES, Ground, ratios
from eval.batching_told import paper_bars, prediction
from eval.said.batching import said
from eval.sessions import session_of
from eval.timed_folder import certified_way, open_timed, plain_entry, turns_of
from serve.requests import Answer

from .conftest import TOLERANCE

QUICK: dict[str, Any] = {
    "n": 6, "tolerance": TOLERANCE, "batches": [1, 2], "simulated": [1, 2, 4], "repeats": 2, "warmups": 0,
    "table_repeats": 1, "allow_noisy": True, "attempts": 1,
}  # fmt: skip


def quick(certified: Path, **changes: Any) -> BatchingConfig:
    return BatchingConfig(str(certified / "model"), **{**QUICK, **changes})


@pytest.fixture(scope="module")
def run_dir(certified: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batching")
    assert batching.run(quick(certified), folder) == 0
    return folder


def summary_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def test_the_program_on_a_random_model(run_dir: Path) -> None:
    summary = summary_of(run_dir)
    rows = pd.DataFrame(summary["rows"])
    assert {"costs-1.json", "costs-2.json", "costs-4.json"} <= {path.name for path in (run_dir / "trials").glob("*/*")}
    assert summary["figures"] == ["batching.png", "batching.pdf"] and not summary["failed"]
    for kind, batches in (("measured", {1, 2}), ("simulated", {1, 2, 4})):
        part = rows[rows["kind"] == kind]
        assert set(part["batch"]) == batches
        for name in ("full", "static", "own", "compact", "rebatch", "sync", "quantile 0.5", "quantile 0.9", "lockstep"):
            assert (part["way"] == name).sum() == len(batches), name
        assert (part[part["way"] == "full"][["tokens_ratio", "latency_ratio"]] == 1.0).all(axis=None)
        assert (part["decode_tokens_per_s"] >= part["tokens_per_s"]).all() or kind == "measured"
    measured = rows[(rows["kind"] == "measured") & (rows["way"] == "own")]
    assert measured["layers"].nunique() == 1 and measured["layers"].iloc[0] == pytest.approx(summary["mean_layers"])
    for row in measured.to_dict("records"):
        assert len(row["tokens_per_s_rounds"]) == 2
        assert row["tokens_ratio_low"] <= row["tokens_ratio"] <= row["tokens_ratio_high"]
    assert pd.read_parquet(run_dir / "rows.parquet").shape[0] == len(rows)
    assert said(summary)


def test_a_run_that_was_interrupted_goes_on_with_its_table(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(certified, batches=[1], rules=[BatchRule.own, BatchRule.rebatch], simulated=[1, 2])
    done = Ground.simulated

    def interrupted(self: Ground, batch: int) -> Any:
        if batch == 2:
            raise KeyboardInterrupt
        return done(self, batch)

    monkeypatch.setattr(Ground, "simulated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batching.run(config, tmp_path)
    kept = {path.name: path.read_text() for path in (tmp_path / "trials").glob("*/*")}
    assert json.loads(kept["2-table.json"])["state"] == "running"
    monkeypatch.setattr(Ground, "simulated", done)
    assert batching.run(config, tmp_path) == 0
    for name in ("1-clock.json", "1-table.json", "costs-1.json"):
        assert kept[name] == next((tmp_path / "trials").glob(f"*/{name}")).read_text()
    assert {row["batch"] for row in summary_of(tmp_path)["rows"]} == {1, 2}


def test_a_batch_size_whose_machine_is_busy_fails_alone(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(ground: Ground, batch: int) -> list[dict[str, Any]]:
        raise CalmError("too busy")

    monkeypatch.setattr(batching, "measured_rows", busy)
    config = quick(certified, batches=[1], rules=[BatchRule.own], simulated=[1])
    assert batching.run(config, tmp_path) == batching.UNFINISHED
    summary = summary_of(tmp_path)
    assert summary["failed"] == {"1-clock": "too busy"} and not summary["noisy"] and not summary["prediction"]
    assert said(summary) == []


def test_simulated_rows_do_what_was_recorded(certified: Path, tmp_path: Path) -> None:
    """One second a layer at batch 1 and nothing else: seconds are layers."""
    config = quick(certified, batches=[1], simulated=[1])
    ground = Ground(config, open_timed(config), tmp_path)
    table, setting = ground.costs(1)
    names = {name: dict.fromkeys(sizes, 0.0) for name, sizes in table.seconds.items()}
    layered = {**names, "layer": dict.fromkeys(names["layer"], 1.0)}
    ground._costs[1] = CostTable({**layered, "layer_gathered": layered["layer"]}), setting
    found = ground.simulated(1)
    for name in ("full", "own", "compact", "sync"):
        answers = ground.recorded["full" if name == "full" else "own"]
        layers = sum(sum(answer.crossing_layers) for answer in answers)
        after_first = sum(sum(answer.crossing_layers[1:]) for answer in answers)
        tokens = sum(len(answer.tokens) for answer in answers)
        assert found[name].seconds == pytest.approx(layers)
        assert found[name].tokens_per_second == pytest.approx(tokens / layers)
        assert found[name].inner_token_latency == pytest.approx(after_first / tokens)


def test_a_round_counts_all_phases_and_layers(certified: Path) -> None:
    config = quick(certified)
    workload = open_timed(config)
    turns = turns_of(plain_entry(2), workload.engine(2), workload)
    turns(1)
    assert not turns.rounds
    turns(6)
    (found,) = turns.rounds
    answers: list[Answer] = turns.answers
    assert found.session == session_of(answers) and found.layers == 2.0
    assert found.row_layers == 2 * found.session.tokens  # no padded rows: one or two of a ladder of 1 and 2
    assert 0.0 < found.decoding < sum(found.seconds.values())


def test_ratios_are_round_by_round() -> None:
    full = {figure: [1.0, 2.0, 4.0] for figure in FIGURES}
    mine = {figure: [2.0, 2.0, 16.0] for figure in FIGURES}
    found = ratios(mine, full)
    assert (found["tokens_ratio"], found["tokens_ratio_low"], found["tokens_ratio_high"]) == (2.0, 1.0, 4.0)
    assert set(found) == {f"{name}_ratio{end}" for name in ("tokens", "decode_tokens", "latency") for end in
                          ("", "_low", "_high")}  # fmt: skip


def row_of(way: str, ratio: float, batch: int = 8, kind: str = "measured", **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch, "kind": kind, "way": way, "tokens_per_s": 100.0 * ratio, "latency_s": 0.1}
    row["decode_tokens_per_s"] = row["tokens_per_s"]
    for name in ("tokens_ratio", "decode_tokens_ratio", "latency_ratio"):
        row |= {name: ratio, f"{name}_low": ratio - 0.05, f"{name}_high": ratio + 0.05}
    return {**row, **changes}


def test_errors_of_predictions_are_told_apart_by_who_decides() -> None:
    rows = [
        row_of("full", 1.0), row_of("compact", 1.5), row_of("sync", 0.5), row_of("compact", 2.0, 16),
        row_of("full", 1.1, kind="simulated"), row_of("compact", 1.2, kind="simulated"),
        row_of("sync", 1.0, kind="simulated"), row_of("compact", 9.0, 256, kind="simulated"),
    ]  # fmt: skip
    found = prediction(rows)
    exact = found["row_exact"]["tokens_per_s"]
    assert exact["mean"] == pytest.approx((0.1 + 0.2) / 2) and exact["largest"] == pytest.approx(0.2)
    assert (exact["way"], exact["batch"], exact["points"]) == ("compact", 8, 2)
    assert found["row_exact"]["tokens_ratio"]["points"] == 1  # full depth to itself is no prediction
    assert found["coupled"]["tokens_per_s"]["largest"] == pytest.approx(1.0)
    (text,) = said({"rows": [], "prediction": found, "noisy": False, "paper": []})
    assert "off by 20 % for static depth" in text and "by 100 % for the rules under which mates" in text
    assert "(largest 100 %: sync at batch 8)" in text


def test_the_papers_bars_are_gains_over_its_full_depth() -> None:
    small, base = paper_bars("softmax")
    assert small["tokens_ratio"] == pytest.approx(1081.04 / 1046.47)
    assert small["latency_ratio"] == pytest.approx(0.075 / 0.234)
    assert small["full_rows"] == pytest.approx(1046.47 * 0.234) and base["model"] == "t5-v1_1-base"
    assert paper_bars("entropy") == []


def told(*rows: dict[str, Any], noisy: bool = False) -> str:
    return " ".join(said({"rows": list(rows), "prediction": {}, "noisy": noisy, "paper": paper_bars("state")}))


def test_what_is_said_follows_the_numbers() -> None:
    won = told(row_of("full", 1.0), row_of("static", 1.2), row_of("own", 1.0), row_of("compact", 1.5))
    assert "compact is fastest at batch 8: 1.50 [1.45, 1.55]" in won and "which is faster than full depth" in won
    assert "static depth of the same mean is slower (1.20" in won
    lost = told(row_of("static", 1.2), row_of("own", 0.8), row_of("compact", 0.5))
    assert "own is fastest" in lost and "which is slower than full depth" in lost and "faster still" in lost
    tied = told(row_of("static", 1.0), row_of("own", 1.0), row_of("compact", 1.02))
    assert "compact, own cannot be told apart as the fastest" in tied and "not to be told from full depth" in tied
    assert "is not to be told from it (1.00" in tied


def test_what_is_said_of_the_papers_rule_and_of_noise() -> None:
    rows = [row_of("sync", ratio, batch) for batch, ratio in ((1, 1.4), (8, 1.0), (64, 0.6))]
    text = told(*rows, noisy=True)
    assert "faster than full depth at batch 1; not to be told from it at batch 8; slower at batch 64" in text
    assert "at batch 64 it gives 0.60" in text and "marked as noisy" in text
    assert "the paper says 1.11 and 0.29 (t5-v1_1-small, 245 sequences at once at full depth and 80 with" in text
    assert "slower" not in told(row_of("sync", 1.4)) and "noisy" not in told(row_of("sync", 1.4))


def test_the_figure_has_every_rule_full_depth_and_the_paper(run_dir: Path) -> None:
    summary = summary_of(run_dir)
    panels = panels_of("batching", summary)
    assert len(panels) == (4 if summary["paper"] else 3)
    axes = draw_panels(panels)
    shown = {text.get_text() for text in axes[0].get_legend().get_texts()}
    assert {"static", "own", "compact", "rebatch", "sync", "quantile 0.5", "quantile 0.9", "lockstep"} == shown
    assert all(any(text.get_text() == "full depth" for text in ax.texts) for ax in axes)
    assert all(ax.get_ylabel() for ax in axes)


def test_measure_and_dtype_are_those_that_are_certified(certified: Path) -> None:
    folder = certified / "model"
    artifacts = load_artifacts(folder)
    plain = next(each for each in artifacts if each.measure is Measure.state)
    picked = [replace(each, picked=each.tolerance == TOLERANCE) for each in plain.certificates]
    other = replace(plain, measure=Measure.max_prob, certificates=tuple(picked))
    assert certified_way([plain, other], folder, 0.45) == (Measure.max_prob, "fp32")
    assert certified_way([plain, other], folder, 0.45, Measure.state) == (Measure.state, "fp32")
    narrow = replace(other, identity=replace(other.identity, head="candidates", head_k=32))
    assert certified_way([narrow, plain], folder, 0.45) == (Measure.state, "fp32")
    for changes in ({"tolerance": 0.01}, {"dtype": "bf16"}, {"measure": Measure.entropy}):
        with pytest.raises(CalibrationError, match="nothing below 1 is certified for risk tolerance"):
            certified_way(artifacts, folder, **{"tolerance": TOLERANCE, **changes})


def test_bad_settings_are_one_line(certified: Path, tmp_path: Path) -> None:
    for wrong, match in (
        ({"rules": [BatchRule.auto]}, "auto is a choice"),
        ({"quantiles": []}, "rule quantile needs"),
        ({"batches": [0]}, "batches and simulated"),
        ({"dtype": "fp16"}, "'fp16' is none"),
        ({"n": 1}, "n must"),
    ):
        with pytest.raises(ConfigError, match=match):
            BatchingConfig(**wrong)  # type: ignore[arg-type]
    (tmp_path / "empty.jsonl").write_text('{"source": "w3", "target": "w3"}\n')
    with pytest.raises((DataError, CalmError)):
        batching.run(quick(tmp_path), tmp_path)
