"""Table 1 on a certified folder: which rows, what is certified of them, and that every file tells the same."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

import calm
from calm.calibration import load_artifacts
from calm.config import Backfill, Consistency, DecoderName, Measure, Precision, Schedule, SplitConfig
from calm.data import load_corpus
from calm.errors import CalibrationError, CheckpointError, ConfigError
from calm.metrics import rouge_l_many
from eval import table1
from eval.common import choose_model
from eval.records import check_whole
from eval.render import as_csv, as_markdown, as_text

from .conftest import MEASURES, TOLERANCE, table_config
from .folders import LENGTH, jsonl_settings, random_folder, tell_corpus, write_parquet

ROWS = ["lead-1", "full", "static-half", "softmax", "softmax@0.85", "state", "state@0.95"]
ROWS += ["classifier", "classifier@0.9", "oracle"]
NONE_GIVEN = {"softmax": None, "state": None, "classifier": None}
PROMISED = {
    "row", "measure", "threshold", "consistency", "tolerance", "error_prob", "n", "picked", "rouge_l", "rouge_l_low",
    "rouge_l_high", "rouge_l_to_full", "layers_skipped", "mean_layers",
}  # fmt: skip


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def rows_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in summary_of(run_dir)["table1"]}


def test_rows_come_in_order_with_every_promised_value(certified: Path) -> None:
    table = summary_of(certified / "table_run")["table1"]
    assert [row["row"] for row in table] == ROWS
    assert all(PROMISED <= set(row) for row in table)
    for row in table:
        assert row["rouge_l_low"] <= row["rouge_l"] <= row["rouge_l_high"]
        assert (row["mean_layers"] is None) == (row["row"] == "lead-1")
        if row["mean_layers"] is not None:
            assert row["layers_skipped"] == pytest.approx(1 - row["mean_layers"] / 4)
            assert row["executed_mean"] >= row["crossing_mean"] == row["mean_layers"]


def test_full_depth_and_half_depth_say_what_they_are(certified: Path) -> None:
    rows = rows_of(certified / "table_run")
    assert (rows["full"]["mean_layers"], rows["full"]["rouge_l_to_full"]) == (4.0, 1.0)
    assert (rows["static-half"]["mean_layers"], rows["static-half"]["layers_skipped"]) == (2.0, 0.5)
    assert rows["full"]["rouge_l"] > 0.9  # the references are its own answers
    assert 1.0 < rows["oracle"]["mean_layers"] < 4.0


def test_certified_rows_repeat_the_artifacts(certified: Path) -> None:
    rows = rows_of(certified / "table_run")
    artifacts = load_artifacts(certified / "model")
    assert {artifact.measure for artifact in artifacts} == {Measure.softmax, Measure.state, Measure.classifier}
    passed = 0
    for artifact in artifacts:
        row, certificate = rows[artifact.measure.value], artifact.certificate(TOLERANCE)
        assert row["threshold"] == certificate.threshold
        assert row["tolerance"] == (TOLERANCE if certificate.certified_below_one else None)
        assert (row["error_prob"], row["n"], row["consistency"]) == (0.05, artifact.n, "risk")
        assert row["test_level"] == pytest.approx(0.05 / 3)
        assert row["picked"] == certificate.picked
        assert (row["layers_skipped"] > 0) == certificate.certified_below_one
        passed += certificate.certified_below_one
    assert 0 < passed < len(artifacts)  # this folder shows both
    assert sum(row["picked"] for row in rows.values()) == 1


def test_a_measure_that_did_not_pass_stays_at_full_depth_and_says_so(certified: Path) -> None:
    summary = summary_of(certified / "table_run")
    rows = {row["row"]: row for row in summary["table1"]}
    failed = [name for name in ("softmax", "state", "classifier") if rows[name]["tolerance"] is None]
    for name in failed:
        assert (rows[name]["threshold"], rows[name]["mean_layers"]) == (1.0, 4.0)
        assert any(note.startswith(f"{name}: nothing below threshold 1 passed") for note in summary["notes"])
    assert len(summary["notes"]) == len(failed)


def test_given_rows_decay_as_in_the_paper_and_certify_nothing(certified: Path) -> None:
    row = rows_of(certified / "table_run")["softmax@0.85"]
    assert (row["threshold"], row["threshold_first"], row["schedule"]) == (0.85, pytest.approx(0.865), "decaying")
    assert row["threshold_last"] == pytest.approx(0.9 * 0.85 + 0.1 * 2.718281828**-4)
    assert (row["tolerance"], row["consistency"], row["n"], row["picked"]) == (None, None, None, False)
    state = rows_of(certified / "table_run")["state@0.95"]
    assert (state["threshold_first"], state["threshold_last"], state["schedule"]) == (0.95, 0.95, "constant")


def test_records_hold_one_row_per_article_and_table_row(certified: Path) -> None:
    run = certified / "table_run"
    records = pq.read_table(run / "records.parquet").to_pandas()
    examples = load_corpus(jsonl_settings(certified / "rows.jsonl"), splits=("test",)).splits["test"]
    assert list(dict.fromkeys(records["row"])) == ROWS
    for name, part in records.groupby("row"):
        assert part["id"].tolist() == [example.id for example in examples]
        assert part["reference"].tolist() == [example.target for example in examples]
        assert part["rouge_l"].mean() == pytest.approx(rows_of(run)[str(name)]["rouge_l"])
        scores = rouge_l_many(part["text"].tolist(), part["reference"].tolist())
        assert part["rouge_l"].to_numpy() == pytest.approx(scores)
    full = records[records["row"] == "full"]
    assert all(len(a) == len(b) for a, b in zip(full["tokens"], full["emission_layers"], strict=True))
    state = records[records["row"] == "state"]
    layers = [layer for one in state["emission_layers"] for layer in one]
    assert sum(layers) / len(layers) == pytest.approx(rows_of(run)["state"]["mean_layers"])
    assert records[records["row"] == "lead-1"]["tokens"].isna().all()


def test_the_record_names_model_rows_metric_and_machine(certified: Path) -> None:
    summary = summary_of(certified / "table_run")
    rows = json.loads((certified / "table_run" / "rows.json").read_text())
    artifact = load_artifacts(certified / "model")[0]
    assert summary["identity"]["model"] == artifact.identity.model
    assert summary["rows"]["calibration"] == {"n": artifact.n, "hash": artifact.calibration_rows}
    assert len(rows["test"]["ids"]) == summary["rows"]["test"]["n"] == summary["table1"][0]["articles"]
    assert set(rows["test"]["ids"]).isdisjoint(rows["calibration"]["ids"])
    assert summary["metric"].startswith("rougeL|") and summary["environment"]["packages"]["torch"]
    assert {"argv", "wall_s", "started", "config"} <= set(summary)


def test_figures_table_files_and_metrics_are_written(certified: Path) -> None:
    run = certified / "table_run"
    for name in ("speed_quality.png", "exit_layers.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
    assert (run / "table1.md").read_text().count("\n") == len(ROWS) + 2
    frame = pd.read_csv(run / "table1.csv")
    assert frame["row"].tolist() == ROWS
    assert frame.set_index("row").loc["full", "rouge_l"] == rows_of(run)["full"]["rouge_l"]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("table1/oracle/mean_layers") == rows_of(run)["oracle"]["mean_layers"] for line in logged)


def test_stdout_ends_in_the_summary_and_shows_the_table(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = table_config(certified / "model", n=8, oracle=False, measures=[Measure.softmax], given=NONE_GIVEN)
    assert table1.run(config, tmp_path) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert json.loads(lines[-1]) == summary_of(tmp_path)
    assert [row["row"] for row in json.loads(lines[-1])["table1"]] == ["lead-1", "full", "static-half", "softmax"]
    assert lines[0] == f"model: {certified / 'model'}"
    assert any(line.startswith("metric: rougeL|") for line in lines)
    assert "full: 8/8 rows" in captured.err


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(certified: Path, tmp_path: Path) -> None:
    assert table1.run(table_config(certified / "model", processes=2), tmp_path) == 0
    one, two = rows_of(certified / "table_run"), rows_of(tmp_path)
    for row in (*one.values(), *two.values()):
        row.pop("wall_s")
    assert one == two
    read = [pq.read_table(run / "records.parquet") for run in (certified / "table_run", tmp_path)]
    assert read[0].equals(read[1])


def test_the_engine_gives_the_table_of_the_batch_decoder(certified: Path, tmp_path: Path) -> None:
    assert table1.run(table_config(certified / "model", decoder=DecoderName.engine), tmp_path) == 0
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path, certified / "table_run"))
    assert ours["identity"]["decoder"] == "engine"
    for row, other in zip(ours["table1"], theirs["table1"], strict=True):
        assert row["row"] == other["row"] and row["exit_histogram"] == other["exit_histogram"]
        assert row["rouge_l"] == pytest.approx(other["rouge_l"]) and row["tokens"] == other["tokens"]


def test_without_a_calibration_the_rows_stay_and_the_note_tells_what_to_do(own_copy: Path, tmp_path: Path) -> None:
    for path in (own_copy / "calibration").iterdir():
        path.unlink()
    config = table_config(own_copy, n=6, oracle=False, measures=[Measure.softmax, Measure.state], given=NONE_GIVEN)
    assert table1.run(config, tmp_path) == 0
    summary = summary_of(tmp_path)
    for row in summary["table1"][3:]:
        assert (row["threshold"], row["tolerance"], row["n"], row["mean_layers"]) == (1.0, None, None, 4.0)
    assert "python -m eval.calibrate calibration.measures=[softmax,state]" in summary["notes"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 0.2}, "was not tested at tolerance 0.2, only at 0.45"),
        ({"backfill": Backfill.copy}, "backfill: 'project' here, 'copy' asked"),
        ({"precision": Precision.bf16}, "dtype: 'float32' here, 'bfloat16' asked"),
    ],
)
def test_a_certificate_of_something_else_is_refused(
    certified: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        table1.run(table_config(certified / "model", **changes), tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_the_certificate_of_another_model_is_refused(certified: Path, own_copy: Path, tmp_path: Path) -> None:
    model = calm.load(own_copy)
    model.classifier.linear.bias.data += 1.0
    kept = {path.name: path.read_bytes() for path in (own_copy / "calibration").iterdir()}
    calm.save(model, own_copy)
    (own_copy / "calibration").mkdir()
    for name, data in kept.items():
        (own_copy / "calibration" / name).write_bytes(data)
    with pytest.raises(CalibrationError, match="does not belong to what it is used with"):
        table1.run(table_config(own_copy), tmp_path)


def test_consistency_that_was_not_calibrated_is_a_note(certified: Path, tmp_path: Path) -> None:
    config = table_config(
        certified / "model",
        n=6,
        oracle=False,
        measures=[Measure.state],
        given=NONE_GIVEN,
        consistency=Consistency.textual,
    )
    assert table1.run(config, tmp_path) == 0
    assert "state: not calibrated for textual consistency" in summary_of(tmp_path)["notes"][0]


def test_another_corpus_is_named_as_not_certified(certified: Path, tmp_path: Path) -> None:
    other = random_folder(tmp_path, count=60)
    data = jsonl_settings(other.parent / "rows.jsonl")
    config = table_config(certified / "model", data=data, n=6, oracle=False, given=NONE_GIVEN)
    run = tmp_path / "run"
    run.mkdir()
    assert table1.run(config, run) == 0
    assert "not certified on the calibration rows of this corpus" in summary_of(run)["notes"][-1]


def test_a_table_of_rows_that_the_model_was_trained_on_is_refused(certified: Path, tmp_path: Path) -> None:
    split = SplitConfig(dev=0.005, calibration=0.022, test=0.97)
    data = replace(jsonl_settings(certified / "rows.jsonl"), split=split)
    with pytest.raises(CalibrationError, match="the model was trained on these rows"):
        table1.run(table_config(certified / "model", data=data), tmp_path)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "changes", "thresholds"),
    [
        ("t5-v1_1-base", {}, [0.85, 0.96, 0.92]),
        ("google/t5-v1_1-small", {}, [0.85, 0.95, 0.9]),
        ("tiny", {}, [0.85, 0.95, 0.9]),
        ("t5-v1_1-base", {"state": 0.5, "softmax": None}, [None, 0.5, 0.92]),
    ],
)
def test_given_thresholds_are_the_papers_of_model_and_corpus(
    certified: Path, tmp_path: Path, name: str, changes: dict[str, float | None], thresholds: list[float | None]
) -> None:
    rows = load_corpus(jsonl_settings(certified / "rows.jsonl")).splits
    news = tmp_path / "news"
    news.mkdir()
    for split, part in (("validation", rows["calibration"]), ("test", rows["test"][:3]), ("train", rows["train"])):
        write_parquet(news / f"{split}-0.parquet", part)
    model = calm.load(certified / "model")
    model.settings = replace(model.settings, model=name)
    data = replace(jsonl_settings(news), name="cnn_dailymail", id_column="id")
    tell_corpus(model, replace(data, text_column="article", summary_column="highlights"))
    config = table_config(calm.save(model, tmp_path / "model"), oracle=False)
    config.given.update(changes)
    assert table1.run(config, tmp_path) == 0
    table = rows_of(tmp_path)
    named = {
        f"{m.value}@{value:g}": m.value for m, value in zip(MEASURES, thresholds, strict=True) if value is not None
    }
    assert [row for row in table if "@" in row] == list(named)
    assert [table[row]["threshold"] for row in named] == [value for value in thresholds if value is not None]
    for row, measure in named.items():
        assert (table[row]["paper"] is not None) == (name != "tiny" and measure not in changes)


def test_given_thresholds_may_follow_the_certified_schedule(certified: Path, tmp_path: Path) -> None:
    config = table_config(
        certified / "model", n=6, oracle=False, measures=[Measure.softmax], given={"softmax": 0.5},
        given_schedule=Schedule.auto,
    )  # fmt: skip
    assert table1.run(config, tmp_path) == 0
    artifact = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.softmax)
    assert rows_of(tmp_path)["softmax@0.5"]["schedule"] == artifact.schedule.value


def test_picks_of_separate_calibrations_do_not_add_up(own_copy: Path, tmp_path: Path) -> None:
    for artifact in load_artifacts(own_copy):
        certificates = tuple(replace(each, picked=True) for each in artifact.certificates)
        replace(artifact, certificates=certificates).save(own_copy / "calibration")
    config = table_config(own_copy, n=6, oracle=False, given=NONE_GIVEN)
    assert table1.run(config, tmp_path) == 0
    assert not any(row["picked"] for row in summary_of(tmp_path)["table1"])
    assert any("come from separate calibrations" in note for note in summary_of(tmp_path)["notes"])


@pytest.mark.parametrize(
    "changes", [{"measures": (Measure.state,)}, {"error_prob": 0.1}, {"calibration_rows": "0" * 64}]
)
def test_measures_of_separate_calibrations_have_no_pick(
    own_copy: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Although a single one of them is picked."""
    artifacts = load_artifacts(own_copy)
    assert sum(each.picked for artifact in artifacts for each in artifact.certificates) == 1
    state = next(artifact for artifact in artifacts if artifact.measure is Measure.state)
    replace(state, **changes).save(own_copy / "calibration")
    config = table_config(own_copy, n=6, oracle=False, given=NONE_GIVEN)
    assert table1.run(config, tmp_path) == 0
    summary = summary_of(tmp_path)
    assert not any(row["picked"] for row in summary["table1"])
    assert sum("come from separate calibrations" in note for note in summary["notes"]) == 1


def test_the_newest_model_folder_is_the_default(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import os
    import shutil

    with pytest.raises(ConfigError, match="no model folder under .*python -m train"):
        choose_model(None, tmp_path)
    for age, name in enumerate(("new/model", "old/model", "run/checkpoints/step-9/model")):
        shutil.copytree(certified / "model", tmp_path / name)
        os.utime(tmp_path / name / "early_exit.json", (1e9 - age * 100 + 500 * (age == 2),) * 2)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "early_exit.json").write_text("{}")
    assert choose_model(None, tmp_path) == tmp_path / "new" / "model"
    assert "the newest under" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no such folder"):
        choose_model(str(tmp_path / "absent"))


def test_a_lost_or_repeated_article_is_noticed(certified: Path) -> None:
    examples = load_corpus(jsonl_settings(certified / "rows.jsonl"), splits=("test",)).splits["test"][:3]
    traces = calm.OneDecoder(calm.load(certified / "model"))(examples, calm.Full())
    check_whole(traces, examples)
    for wrong in (traces[:2], [*traces[:2], traces[1]], traces[::-1], [*traces, traces[0]]):
        with pytest.raises(ValueError, match="traces for 3 articles"):
            check_whole(wrong, examples)


def test_the_three_forms_of_the_table_agree(certified: Path) -> None:
    table = summary_of(certified / "table_run")["table1"]
    text, markdown = as_text(table).splitlines(), as_markdown(table).splitlines()
    assert len({len(line) for line in text}) == 1
    assert "paper ROUGE-L" not in text[1]
    table[1]["paper"] = {"source": "framework", "rouge_l": 0.3524}
    assert "paper ROUGE-L" in as_text(table) and "0.3524" in as_markdown(table).splitlines()[3]
    assert as_csv(table).splitlines()[0].endswith("paper_rouge_l,paper_source")
    assert markdown[1].startswith("| --- | ---: |")


def test_thresholds_per_layer_are_shown_as_a_range(certified: Path) -> None:
    table = summary_of(certified / "table_run")["table1"]
    table[3]["threshold"] = [0.9, 0.5, 0.7]
    assert "0.500..0.900" in as_text(table)


def test_matplotlib_does_not_chat(certified: Path) -> None:
    assert logging.getLogger("matplotlib").level == logging.WARNING


def test_every_answer_fits_the_length(certified: Path) -> None:
    records = pq.read_table(certified / "table_run" / "records.parquet").to_pandas()
    assert max(len(tokens) for tokens in records["tokens"].dropna()) <= LENGTH
