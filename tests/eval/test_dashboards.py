"""Dashboards name only what runs log: each spec is held against offline runs of W&B, read back by its own reader."""

import json
import os
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calm.calibration import load_artifacts
from calm.config import CalibrationConfig, SplitConfig, Stage, TrackingConfig, TrackingMode
from calm.dashboards import FOLDER, Logged, check, fields_of, logged, read_charts, read_dashboards
from calm.dashboards_config import DashboardsConfig
from calm.errors import CheckpointError, ConfigError
from calm.tracking import STEP, Tracker, read_metrics
from calm.tracking_cards import calibration_card, model_card, said_name, weights_card
from calm.tracking_tables import SHOWN_ARTICLES, TRACES, TRACES_COLUMNS
from eval import calibrate, dashboards, table1
from train.run import train

from ..calm.test_tracking import offline_records
from ..train.tiny import tiny_config
from .conftest import MEASURES, TOLERANCE, calibration_config, table_config

OFFLINE = TrackingConfig(TrackingMode.offline, tags=["nightly"])
KINDS = ("train", "calibrate", "table1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model trained, certified and evaluated with W&B offline: the run folder of each program."""
    if os.environ.get("WANDB_MODE") == "disabled":
        pytest.skip("WANDB_MODE=disabled")
    parent = tmp_path_factory.mktemp("runs")
    folders = {kind: parent / kind for kind in KINDS}
    for folder in folders.values():
        folder.mkdir()
    settings = tiny_config(
        stage=Stage.all, tracking=replace(OFFLINE, upload_model=True), finetune__steps=3, classifier__steps=2,
        classifier__log_every=1, processes=1, data__split=SplitConfig(0.15, 0.4, 0.3),
        calibration=CalibrationConfig(tolerances=[TOLERANCE], grid_size=2, dev_rows=10),
    )  # fmt: skip
    assert train(settings, folders["train"]) == 0
    model = folders["train"] / "model"
    asked = replace(calibration_config(model, grid_size=3), tracking=OFFLINE)
    assert calibrate.run(asked, folders["calibrate"]) in (0, calibrate.NOTHING_PASSED)
    assert table1.run(table_config(model, tracking=OFFLINE), folders["table1"]) == 0
    return folders


def kept_by_wandb(run_dirs: list[Path]) -> Logged:
    """Metrics and columns of tables that the .wandb files hold."""
    found = Logged(set())
    for run_dir in run_dirs:
        (files,) = (run_dir / "wandb").glob("offline-run-*/files")
        for record in offline_records(run_dir):
            item = record["history"]["item"] if record["type"] == "history" else {}
            for key, value in item.items():
                if key.endswith("._type") and value == "table-file":
                    name = key.removesuffix("._type")
                    table = json.loads((files / item[f"{name}.path"]).read_text())
                    found.tables[name] = tuple(table["columns"])
                elif not key.startswith("_"):
                    found.metrics.add(key)
    return found


def artifacts_of(run_dir: Path, used: bool) -> dict[str, tuple[str, str]]:
    """Type and digest by name of what a run made, or used."""
    told = [record["artifact"] for record in offline_records(run_dir) if record["type"] == "artifact"]
    return {
        each["name"]: (each["type"], each["digest"])
        for each in told
        if each["type"] != "run_table" and each.get("use_after_commit", False) is used
    }


def test_every_spec_names_metrics_and_columns_that_offline_runs_hold(runs: dict[str, Path]) -> None:
    kept = kept_by_wandb(list(runs.values()))
    shown = read_dashboards()
    assert [each.name for each in shown] == ["calibration", "evaluation", "report", "training"]
    check(shown, kept)
    check(shown, logged(runs.values()))  # metrics.jsonl says the same
    assert kept.tables == logged(runs.values()).tables
    for name, kind in (("training", "train"), ("calibration", "calibrate"), ("evaluation", "table1")):
        check(read_dashboards([name]), kept_by_wandb([runs[kind]]))  # and in the run that it is of


def test_every_chart_is_vega_lite_that_wandb_can_fill() -> None:
    charts = read_charts(read_dashboards())
    assert sorted(charts) == sorted(path.stem for path in (FOLDER / "charts").glob("*.json"))
    for name, spec in charts.items():
        assert spec["$schema"].startswith("https://vega.github.io/schema/vega-lite/"), name
        assert fields_of(spec) and re.search(r'"(mark|layer|spec)"', json.dumps(spec)), name


def test_runs_have_a_job_type_a_group_and_tags(runs: dict[str, Path]) -> None:
    for kind, run_dir in runs.items():
        (told,) = [record["run"] for record in offline_records(run_dir) if record["type"] == "run"]
        assert (told["job_type"], told["run_group"]) == (kind, "test-restaurants")
        assert told["tags"] == ["nightly", "test-restaurants"]


def test_the_report_leads_to_its_certificates_and_they_to_their_model(runs: dict[str, Path]) -> None:
    trained, certified, told = (artifacts_of(runs[kind], used=False) for kind in KINDS)
    assert trained["test-restaurants"][0] == "model"
    names = {f"test-restaurants-{measure.value}-risk" for measure in MEASURES}
    assert set(certified) == names and {kind for kind, _ in certified.values()} == {"calibration"}
    assert artifacts_of(runs["calibrate"], used=True) == {"test-restaurants": trained["test-restaurants"]}
    sources = artifacts_of(runs["table1"], used=True)
    assert sources == {"test-restaurants": trained["test-restaurants"], **certified}
    assert {kind for kind, _ in told.values()} == {"report"}
    assert trained["test-restaurants-weights"][0] == "weights"
    lines = [line for line in read_metrics(runs["table1"]) if line.get("event") in ("used", "made")]
    assert [line["event"] for line in lines] == ["used"] * 4 + ["made"]
    assert lines[0]["sha256"] == model_card(runs["train"] / "model").sha256


def test_artifacts_of_an_offline_run_lie_in_its_folder(runs: dict[str, Path]) -> None:
    for run_dir in runs.values():
        staged = [
            Path(entry["local_path"])
            for record in offline_records(run_dir)
            if record["type"] == "artifact"
            for entry in record["artifact"]["manifest"]["contents"]
        ]
        assert staged and all(path.is_file() and path.is_relative_to(run_dir.resolve()) for path in staged)


def test_the_trace_table_says_what_the_first_answers_did(runs: dict[str, Path]) -> None:
    (path,) = (runs["table1"] / "wandb").glob("offline-run-*/files/media/table/table1/traces*.json")
    rows = [dict(zip(TRACES_COLUMNS, row, strict=True)) for row in json.loads(path.read_text())["data"]]
    assert 0 < len({row["article"] for row in rows}) <= SHOWN_ARTICLES
    summary = json.loads((runs["table1"] / "summary.json").read_text())
    thresholds = {row["row"]: row["threshold_last"] for row in summary["table1"] if row["measure"]}
    assert {row["row"] for row in rows} == set(thresholds)
    last = summary["layers"]
    for row in rows:
        assert 1 <= row["exit_layer"] <= last and isinstance(row["token"], str)
        if row["exit_layer"] < last:
            assert row["confidence"] >= thresholds[row["row"]] - 1e-4
        else:
            assert row["confidence"] is None
    assert any(row["confidence"] is not None for row in rows)
    event = next(line for line in read_metrics(runs["table1"]) if line.get("key") == TRACES)
    assert event["rows"] == len(rows)


def test_a_key_that_no_run_has_is_one_error_with_spec_and_key(tmp_path: Path, runs: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "wandb"))
    have = logged(runs.values())
    original = (folder / "training.json").read_text()
    (folder / "training.json").write_text(original.replace("eval/rougeL", "eval/rougeX"))
    with pytest.raises(ConfigError, match=r"training: \"full depth's ROUGE-L on dev\" names the metric 'eval/rougeX'"):
        check(read_dashboards(folder=folder), have)
    (folder / "training.json").write_text(original.replace("train/loss_layer_*", "train/loss_lair_*"))
    with pytest.raises(ConfigError, match=r"names the metric 'train/loss_lair_\*', which no run has logged"):
        check(read_dashboards(folder=folder), have)
    evaluation = (folder / "evaluation.json").read_text()
    (folder / "training.json").write_text(original)
    (folder / "evaluation.json").write_text(evaluation.replace('"exit_layer"', '"exit_lair"'))
    with pytest.raises(ConfigError, match="evaluation: .* names the column 'exit_lair', which table 'table1/traces'"):
        check(read_dashboards(folder=folder), have)
    (folder / "evaluation.json").write_text(evaluation.replace('"table1/exits"', '"table1/exit"'))
    with pytest.raises(ConfigError, match="names the table 'table1/exit', which no run has logged"):
        check(read_dashboards(folder=folder), have)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{", "cannot read"),
        ("[]", "is no JSON object"),
        ('{"about": ""}', "is no dashboard"),
        ('{"kind": "pie", "title": "t"}', "'pie' is no kind of panel; there are lines, bars"),
        ('{"kind": "lines", "title": "t", "y": []}', "panel 't' has y; lines needs x, y"),
        ('{"kind": "bars", "title": "t", "y": ["a*"]}', r"'a\*': a \* is for lines only"),
        ('{"kind": "chart", "title": "t", "chart": "exit_layers", "table": "a", "fields": {}}', "gives fields"),
    ],
)
def test_a_spec_that_is_none_is_one_error(spec: str, said: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "wandb"))
    whole = f'{{"about": "", "sections": [{{"name": "s", "panels": [{spec}]}}]}}' if '"kind"' in spec else spec
    (folder / "report.json").write_text(whole)
    with pytest.raises(ConfigError, match=said):
        read_charts(read_dashboards(["report"], folder), folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"$schema": "https://elsewhere"}, "no .schema of Vega-Lite"),
        ({"data": {"name": "table"}}, "its data must be"),
        ({"encoding": {}}, "has no .{field"),
    ],
)
def test_a_chart_that_wandb_cannot_fill_is_one_error(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "wandb"))
    path = folder / "charts" / "exit_layers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=said):
        read_charts(read_dashboards(["evaluation"], folder), folder)


def test_the_command_shows_and_checks_without_an_account(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = DashboardsConfig(dry_run=True, check=[str(run) for run in runs.values()])
    assert dashboards.run(asked, tmp_path) == 0
    out = capsys.readouterr().out
    assert "every metric and column" in out and "workspace calm training" in out
    assert "chart risk_by_threshold of calibration/risk" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["made"] == [] and "trace" in summary["charts"]
    with pytest.raises(ConfigError, match="'nobody' is no dashboard; there are calibration, evaluation"):
        dashboards.run(DashboardsConfig(dry_run=True, names=["nobody"]), tmp_path)
    with pytest.raises(ConfigError, match="holds no metrics.jsonl"):
        dashboards.run(DashboardsConfig(dry_run=True, check=[str(tmp_path)]), tmp_path)


class Stand:
    """Takes what a class of wandb-workspaces takes."""

    def __init__(self, *_: Any, **values: Any) -> None:
        self.values, self.name, self.url = values, values.get("name"), "https://wandb.test/w"

    def save(self) -> None:
        Made.saved.append(self)


class Made:
    """What a stand-in for W&B was asked to make."""

    saved: list[Stand] = []
    charts: list[str] = []
    refuse = ""
    default_entity = "somebody"

    def create_custom_chart(self, **values: Any) -> str:
        if self.refuse:
            raise RuntimeError(self.refuse)
        assert (values["entity"], values["access"], values["spec_type"]) == ("somebody", "private", "vega2")
        self.charts.append(values["name"])
        return f"{values['entity']}/{values['name']}"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    names = ("LinePlot", "BarPlot", "ScatterPlot", "WeavePanelSummaryTable", "CustomChart", "SummaryMetric")
    modules: dict[str, dict[str, Any]] = {
        "wandb_workspaces": {},
        "wandb_workspaces.reports": {},
        "wandb_workspaces.reports.v2": dict.fromkeys(names, Stand),
        "wandb_workspaces.workspaces": {"Section": Stand, "Workspace": Stand},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.setattr(wandb, "Api", Made)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setattr(Made, "saved", [])
    monkeypatch.setattr(Made, "charts", [])


def test_charts_are_made_before_the_workspaces_that_draw_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    assert dashboards.run(DashboardsConfig(names=["calibration", "report"]), tmp_path) == 0
    assert Made.charts == ["calm-risk_by_threshold", "calm-risk_by_depth"]
    assert [space.name for space in Made.saved] == ["calm calibration", "calm report"]
    panels = Made.saved[0].values["sections"][0].values["panels"]
    assert panels[0].values["chart_name"] == "somebody/calm-risk_by_threshold"
    regex = Made.saved[0].values["sections"][1].values["panels"][0].values["metric_regex"]
    assert re.search(regex, "calibration/state/threshold") and not re.search(regex, "calibration/state/mean_loss")
    assert json.loads((tmp_path / "summary.json").read_text())["made"] == ["https://wandb.test/w"] * 2
    monkeypatch.setattr(Made, "refuse", "a chart of this name already exists")
    assert dashboards.run(DashboardsConfig(names=["evaluation"]), tmp_path) == 0
    assert "is there already" in capsys.readouterr().out


def test_what_stops_an_upload_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(Made, "refuse", "permission denied\nlong trace")
    with pytest.raises(ConfigError, match=r"^W&B refused: permission denied; check entity= and project="):
        dashboards.run(DashboardsConfig(names=["evaluation"]), tmp_path)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ConfigError, match="wandb-workspaces, which the extra 'dashboards' brings"):
        dashboards.run(DashboardsConfig(names=["evaluation"]), tmp_path)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="run `wandb login`, or set WANDB_API_KEY; dry_run=true"):
        dashboards.run(DashboardsConfig(), tmp_path)


def test_cards_are_of_content_and_of_no_place(certified: Path, own_copy: Path) -> None:
    here, there = model_card(certified / "model"), model_card(own_copy)
    assert here == there and here.sha256 == there.sha256
    assert not any(name.startswith("calibration/") for name in here.metadata["hashes"])
    assert weights_card(own_copy).files["model.safetensors"] == own_copy / "model.safetensors"
    artifact = load_artifacts(own_copy)[0]
    card = calibration_card(artifact, here.name)
    assert card.files[f"{artifact.name}.json"] == (own_copy / f"calibration/{artifact.name}.json").read_text()
    shutil.rmtree(own_copy / "calibration")
    assert model_card(own_copy) == here
    (own_copy / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no MANIFEST.json"):
        model_card(own_copy)
    assert said_name("a b/c", "x") == "a-b-c-x" and said_name(None, None) == "model"


def test_tables_and_cards_stay_in_the_file_where_wandb_is_off(tmp_path: Path, certified: Path) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(TrackingMode.disabled), "x")
    tracker.log({"a": 1.0}, 2)
    tracker.table("t", ["b"], [[1.0]])
    tracker.used(model_card(certified / "model"))
    tracker.finish()
    assert logged([tmp_path]) == Logged({STEP, "a"}, {"t": ("b",)})
    assert read_metrics(tmp_path)[-1]["type"] == "model" and not (tmp_path / "wandb").exists()
