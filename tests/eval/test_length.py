"""Layers skipped by length, and predictions at other lengths: against sums written out by hand."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calm.cost import CostTable
from calm.errors import CheckpointError, ConfigError, DataError
from calm.experiment_config import LengthConfig
from calm.report_plots import draw_panels, panels_of
from calm.sim_rows import Setting
from eval import length
from eval.length_predicted import Predictor, predicted
from eval.length_records import SourceTokens, by_halves, by_length, by_position, quartiles, skipped
from eval.recorded import Answers, padded, read_answers, read_records
from serve.engine import Engine

LAYERS = 4
SMALL: dict[str, Any] = {"shape": "tiny", "dtype": "fp32", "sources": [16, 32], "batches": [1, 2], "outputs": [2, 5]}
QUICK: dict[str, Any] = {**SMALL, "draws": 2, "repeats": 1, "bootstrap": 20, "fewest": 2}


def answers_of(layers: list[list[int]], loss: list[float] | None = None) -> Answers:
    return Answers([f"e{i}" for i in range(len(layers))], padded(layers), np.array(loss or [0.0] * len(layers)))


def test_equal_lengths_share_a_quartile() -> None:
    assert quartiles(np.arange(8)).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert quartiles(np.array([5, 5, 5, 5, 9])).tolist() == [1, 1, 1, 1, 4]


def test_a_quartile_is_told_by_its_tokens_and_articles() -> None:
    layers = [[1, 4], [2, 2, 2], [4], [1, 1, 1, 1], [4, 4], [3], [2], [4, 1, 1]]
    lengths = np.array([10, 11, 12, 13, 14, 15, 16, 17])
    found = by_length(answers_of(layers, [i / 10 for i in range(8)]), lengths, LAYERS, LengthConfig(**QUICK), 15)
    assert [(row["shortest"], row["longest"], row["articles"], row["tokens"]) for row in found] == [
        (10, 11, 2, 5), (12, 13, 2, 5), (14, 15, 2, 3), (16, 17, 2, 4),
    ]  # fmt: skip
    for row, group in zip(found, (layers[:2], layers[2:4], layers[4:6], layers[6:]), strict=True):
        tokens = [layer for answer in group for layer in answer]
        assert row["layers_skipped"] == pytest.approx(1 - sum(tokens) / len(tokens) / LAYERS)
        assert row["layers_skipped_low"] <= row["layers_skipped"] <= row["layers_skipped_high"]
    assert [row["loss"] for row in found] == pytest.approx([0.05, 0.25, 0.45, 0.65])
    assert [row["cut"] for row in found] == [0.0, 0.0, 0.0, 1.0]


def test_intervals_draw_articles_with_all_their_tokens() -> None:
    config = LengthConfig(**{**QUICK, "bootstrap": 400})
    one, same = padded([[1, 1, 1, 1], [4]]), padded([[2, 2], [2]])
    found = skipped(one, LAYERS, config)
    assert (found["layers_skipped_low"], found["layers_skipped_high"]) == (0.0, 0.75)  # twice the one, twice the other
    assert skipped(same, LAYERS, config) == {f"layers_skipped{end}": 0.5 for end in ("", "_low", "_high")}


def test_positions_count_the_answers_that_reach_them() -> None:
    found = by_position(answers_of([[1, 4, 2], [3, 2], [2]]), LAYERS, LengthConfig(**QUICK))
    assert [(row["group"], row["articles"], row["layers_skipped"]) for row in found] == [(1, 3, 0.5), (2, 2, 0.25)]


def test_halves_compare_an_answer_with_itself() -> None:
    (found,) = by_halves(answers_of([[4, 2, 1], [4, 4, 2, 2, 1, 1], [3]]), LAYERS, LengthConfig(**QUICK))
    first, second = (4 - 1) / LAYERS, (10 / 3 - 4 / 3) / LAYERS
    assert found["late_minus_early"] == pytest.approx((first + second) / 2) and found["articles"] == 2
    inner = ((4 + 2) / 2 - (2 + 1) / 2) / LAYERS  # of 4, 2, 2, 1; the others have one token inside, or none
    assert found["inner_late_minus_early"] == pytest.approx(inner) and found["inner_articles"] == 1
    assert by_halves(answers_of([[3]]), LAYERS, LengthConfig(**QUICK)) == []


def test_a_prediction_adds_the_table_up() -> None:
    free = ["start", "check", "first_check:state", "check:state", "stay", "pack", "merge", "part", "read"]
    free += ["admit", "end", "row", "step", "move"]
    costs: dict[str, dict[int, float]] = {name: {1: 0.0} for name in free}
    costs |= {name: {1: 1.0} for name in ("layer", "layer_gathered")}
    costs |= {"head": {1: 2.0}, "encode": {16: 10.0}, "backfill:1": {1: 0.25}}
    setting = Setting(
        LAYERS, (1,), frozenset({1, 2, 3}), prefill_rows=1, packed=False, padded_calls=False, cross_cache_rows=0
    )
    drawn = [((2, 4, 1),), ((3, 3, 2),)]
    found = predicted(CostTable(costs), setting, drawn, 16, 3, LengthConfig(**QUICK))
    full = 10 + 3 * (LAYERS + 2)
    exits = [10 + sum(depth + 2 + 0.25 * (LAYERS - depth) for depth in row) for (row,) in drawn]
    assert found["full_call_s"] == pytest.approx(full) and found["exit_call_s"] == pytest.approx(sum(exits) / 2)
    assert found["call_ratio"] == pytest.approx(2 * full / sum(exits))
    steps = [sum(depth + 2 + 0.25 * (LAYERS - depth) for depth in row[1:]) / 2 for (row,) in drawn]
    assert found["step_ratio"] == pytest.approx(2 * (LAYERS + 2) / sum(steps))
    assert found["prefill_share"] == pytest.approx(10 / full) and found["mean_depth"] == 15 / 6
    assert found["call_ratio_low"] <= found["call_ratio"] <= found["call_ratio_high"]


def test_one_thread_is_timed_by_its_own_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = []

    def measured(engine: Engine, *_: Any) -> CostTable:
        clocks.append(engine.clock.now)
        return CostTable({})

    monkeypatch.setattr("serve.measure.measure", measured)
    for threads, said in ((1, "processor time of the thread"), (2, "wall clock")):
        monkeypatch.setattr("torch.set_num_threads", lambda _: None)
        _, setting, about = Predictor(LengthConfig(**QUICK, threads=threads)).measured(16, 2)
        assert about["clock"] == said and 0 <= about["lost"] <= 1 and setting.buckets[-1] == 2
    assert clocks == [time.thread_time, time.perf_counter]


def test_the_program_on_a_table_and_a_tiny_shape(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LengthConfig(str(certified / "table_run"), rows=["full", "state"], **QUICK)
    assert length.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == {} and summary["source_tokens_read"] == 16
    assert summary["figures"] == ["length.png", "length.pdf"] and "no call was timed" in summary["predicted_by"]
    rows = pd.DataFrame(summary["rows"])
    kept = rows[rows["part"] == "records"]
    assert set(kept["by"]) == {"source", "output", "position", "halves"}
    assert (kept[(kept["row"] == "full") & (kept["by"] != "halves")]["layers_skipped"] == 0).all()
    assert (kept[(kept["row"] == "full") & (kept["by"] == "output")]["loss"] == 0).all()
    table = {row["row"]: row for row in json.loads((certified / "table_run/summary.json").read_text())["table1"]}
    for kind in ("source", "output"):
        part = kept[(kept["row"] == "state") & (kept["by"] == kind)]
        for name, weights in (("layers_skipped", part["tokens"]), ("loss", part["articles"])):
            whole = float((part[name] * weights).sum() / weights.sum())
            said = table["state"]["layers_skipped" if name == "layers_skipped" else "rouge_l_to_full"]
            assert whole == pytest.approx(said if name == "layers_skipped" else 1 - said)
    told = rows[rows["part"] == "predicted"]
    assert set(zip(told["source"], told["batch"], told["tokens"], strict=True)) == {
        (source, batch, tokens) for source in (16, 32) for batch in (1, 2) for tokens in (2, 5)
    }
    assert (told[["call_ratio", "step_ratio", "full_step_s", "exit_call_s"]] > 0).all(axis=None)
    assert pd.read_parquet(tmp_path / "rows.parquet").shape[0] == len(rows)
    assert length.run(config, tmp_path) == 0  # nothing is measured twice
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_records_without_their_model_keep_the_other_half(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lonely = certified / "table_run", tmp_path / "lonely"
    lonely.mkdir()
    said = json.loads((folder / "summary.json").read_text())
    (lonely / "summary.json").write_text(json.dumps({**said, "checkpoint": "gone"}))
    (lonely / "records.parquet").write_bytes((folder / "records.parquet").read_bytes())
    config = LengthConfig(str(lonely), rows=["state"], **{**QUICK, "sources": []})
    assert length.run(config, tmp_path) == 0
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert {row["by"] for row in rows} == {"output", "position", "halves"}
    assert "no source lengths: the model of" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="nowhere"):
        length.run(LengthConfig(str(lonely), "nowhere", ["state"], **QUICK), tmp_path)
    other = {**said, "checkpoint": "gone", "rows": {"test": {"n": 5, "hash": "another"}}}
    (lonely / "summary.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match="are not those that"):
        length.run(LengthConfig(str(lonely), str(certified / "model"), ["state"], **QUICK), tmp_path)


def test_bad_input_is_one_line(certified: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"shape": "huge"}, "shape='huge' is none"),
        ({"outputs": [1]}, r"outputs must lie in \[2, inf\]"),
        ({"batches": []}, "batches needs at least one entry"),
        ({"draws": 0}, "draws must lie in"),
    ):
        with pytest.raises(ConfigError, match=message):
            LengthConfig(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'nobody' is none of"):
        length.run(LengthConfig(str(certified / "table_run"), rows=["nobody"], **QUICK), tmp_path)
    with pytest.raises(DataError, match="has no article 'e9'"):
        SourceTokens({"e1": 4}, 16).of(["e1", "e9"])
    lists = pa.array([[1], [2]], type=pa.list_(pa.int32()))
    table = {"id": ["a", "a"], "row": ["full"] * 2, "crossing_layers": lists, "emission_layers": lists}
    (tmp_path / "summary.json").write_text(json.dumps({"started": "then", "table1": []}))
    for more, message in (({}, "has no ids, layers and ROUGE-L"), ({"rouge_l_to_full": [1.0, 1.0]}, "is there twice")):
        pq.write_table(pa.table({**table, **more}), tmp_path / "records.parquet")
        with pytest.raises(DataError, match=message):
            read_answers(read_records(str(tmp_path)), "full")


def test_the_figure_has_baselines_and_every_source_length() -> None:
    span = {"layers_skipped": 0.5, "layers_skipped_low": 0.4, "layers_skipped_high": 0.6}
    kept = [
        {"part": "records", "row": "state", "by": kind, "group": group, **span}
        for kind in ("source", "output", "position")
        for group in (1, 2, 3, 4)
    ]
    gain = {"call_ratio": 1.2, "call_ratio_low": 1.1, "call_ratio_high": 1.3}
    told = [
        {"part": "predicted", "source": source, "batch": batch, "tokens": tokens, **gain}
        for source in (32, 512)
        for batch in (1, 8)
        for tokens in (8, 16)
    ]
    axes = draw_panels(panels_of("length", {"rows": kept + told}))
    assert "batch 8: predicted" in axes[1].get_title() and "measured cost table" in axes[1].get_ylabel()
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["32 source tokens", "512 source tokens"]
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["state, source", "state, output"]
    assert all(any(text.get_text() == "full depth" for text in ax.texts) for ax in axes)
    assert len(draw_panels(panels_of("length", {"rows": kept}))) == 2
