"""eval.drift: an alarm on other traffic and none on usual traffic, and actions compared on the very same requests."""

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from calm.calibration import ConsistencyLoss, load_artifacts
from calm.cli import settings
from calm.config import CONF_DIR, Consistency, DataConfig, Measure, OnDrift, RunnerName, SplitConfig
from calm.data import load_corpus
from calm.drift_config import DriftConfig
from calm.errors import CalibrationError, ConfigError
from calm.metrics import mean
from calm.records import Example
from eval import calibrate, drift
from eval.drift_figures import shares, shuffled, spans
from eval.drift_served import Client
from eval.drift_table import COLUMNS
from serve.decoder import trace_of
from serve.drift import Reference, ShiftDetector, share_skipped
from serve.engine import Engine
from serve.options import RequestOptions

from ..conftest import RunProgram
from ..scripted import examples
from .conftest import calibration_config
from .folders import VOCABULARY, jsonl_settings, random_folder, write_jsonl

TOLERANCE, NOTHING_PASSES = 0.85, 0.01
PER_ALARM = 200.0
LAYERS, ROWS = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model certified far down its grid at one tolerance, and not below full depth at another."""
    parent = tmp_path_factory.mktemp("drift")
    made = random_folder(parent)
    (parent / "run").mkdir()
    asked = calibration_config(made, measures=[Measure.state], tolerances=[TOLERANCE, NOTHING_PASSES])
    calibrate.run(asked, parent / "run")
    return made


def engine_of(folder: Path, on_drift: OnDrift = OnDrift.warn, rows: int = ROWS) -> Engine:
    return Engine(
        folder, max_batch=rows, runner=RunnerName.eager, on_drift=on_drift, requests_per_alarm=PER_ALARM,
        drift_patience=10_000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def other(folder: Path) -> DataConfig:
    """Requests whose answers leave earlier than most; references are what the model says at full depth."""
    engine, pool = engine_of(folder, rows=32), examples(VOCABULARY, 500, seed=11, longest=7)
    early = engine.generate([row.source for row in pool], tolerance=TOLERANCE)
    depth = {row.id: share_skipped(a.emission_layers, LAYERS) for row, a in zip(pool, early, strict=True)}
    chosen = sorted(pool, key=lambda row: depth[row.id])[-150:]
    full = engine.generate([row.source for row in chosen])
    rows = [Example(r.id, r.family, r.source, a.text or "w3") for r, a in zip(chosen, full, strict=True)]
    split = SplitConfig(dev=0.02, calibration=0.02, test=0.9)
    return replace(jsonl_settings(write_jsonl(folder.parent / "other.jsonl", rows)), split=split)


def drift_config(folder: Path, other: DataConfig | None, **changes: Any) -> DriftConfig:
    values: dict[str, Any] = {
        "tolerance": TOLERANCE, "requests_per_alarm": PER_ALARM, "drift_patience": 10_000, "shuffles": 5,
        "batch_size": ROWS, "runner": RunnerName.eager, "bootstrap": 50,
    }  # fmt: skip
    return DriftConfig(str(folder), traffic=other, **{**values, **changes})


@pytest.fixture(scope="module")
def run_dir(folder: Path, other: DataConfig) -> Path:
    """Of one run of all actions, what it printed beside what it wrote."""
    made = folder.parent / "all"
    made.mkdir()
    with redirect_stdout(StringIO()) as printed:
        assert drift.run(drift_config(folder, other), made) == 0
    (made / "stdout").write_text(printed.getvalue())
    return made


def summary_of(run_dir: Path) -> Any:
    return json.loads((run_dir / "summary.json").read_text())


def test_each_corpus_can_be_the_traffic() -> None:
    for name in sorted(path.stem for path in (CONF_DIR / "data").glob("*.yaml")):
        config = settings("drift", DriftConfig, [f"traffic={name}", "traffic.max_eval_rows=7"])
        assert config.data is None and config.traffic is not None
        assert config.traffic == settings("drift", DriftConfig, [f"data={name}", "data.max_eval_rows=7"]).data


def test_other_traffic_alarms_and_every_action_is_compared_on_the_same_requests(run_dir: Path) -> None:
    summary = summary_of(run_dir)
    assert json.loads((run_dir / "stdout").read_text().splitlines()[-1]) == summary
    requests = summary["requests"]["traffic"]
    assert summary["requests"]["usual"] > 50 and requests > 100
    warn, conservative, full = summary["actions"]
    assert [each["on_drift"] for each in summary["actions"]] == ["warn", "conservative", "full"]
    for told in summary["actions"]:  # up to the first alarm all do the same
        assert told["alarms"]["usual"] == [] and told["alarm"] == warn["alarm"]
        assert told["alarm"]["phase"] == "traffic" and 0 < told["alarm"]["after"] < requests
        assert told["before"] == warn["before"]
        assert told["before"]["requests"] + told["after"]["requests"] == requests
        assert sum(span["requests"] for span in told["thresholds"]) == requests
    assert 0 <= warn["before"]["requests"] - warn["alarm"]["after"] < ROWS  # those that were under way
    assert conservative["after_warn"] == full["after_warn"] == warn["after"] and "change" not in warn
    assert warn["after"]["answer_skipped"] > conservative["after"]["answer_skipped"] > full["after"]["answer_skipped"]
    assert (full["after"]["layers_skipped"], full["after"]["mean_exit_layer"]) == (0.0, LAYERS)
    assert (full["after"]["risk"], full["after"]["rouge_l_to_full"]) == (0.0, 1.0)
    for told in (conservative, full):
        for name in ("risk", "rouge_l"):
            change = told["after"][name] - told["after_warn"][name]
            assert told["change"][name] == pytest.approx(change)
            low, high = told["change"][f"{name}_interval"]
            assert low <= change <= high
    asked = warn["thresholds"][0]["place"]
    assert [span["place"] for span in warn["thresholds"]] == [asked]
    assert [span["place"] for span in full["thresholds"]] == [asked, 0]
    assert [span["place"] for span in conservative["thresholds"]][:2] == [asked, asked - 1]
    assert summary["clean"]["alarms"] == 0 and summary["clean"]["after"] is None
    assert summary["shifted"]["alarms"] == summary["shifted"]["shuffles"] == 5
    lines = (run_dir / "drift.md").read_text().splitlines()
    assert len(lines) == 2 + 1 + 6 + 2 and all(line.count("|") == len(COLUMNS) + 1 for line in lines)


def test_what_warn_gives_is_what_the_threshold_gives_to_those_requests(
    folder: Path, other: DataConfig, run_dir: Path
) -> None:
    """The comparison by another way: these rows alone, at the certified threshold and at full depth."""
    told = summary_of(run_dir)["actions"][2]
    rows = load_corpus(other, splits=("test",)).splits["test"][-told["after"]["requests"] :]
    engine, names = engine_of(folder), [row.id for row in rows]
    early, full = (
        [trace_of(answer) for answer in engine.generate([row.source for row in rows], options, names=names)]
        for options in (RequestOptions(tolerance=TOLERANCE), RequestOptions())
    )
    risk = mean(ConsistencyLoss(Consistency.risk, rows, full)(early))
    assert risk > 0 and told["after_warn"]["risk"] == pytest.approx(risk)
    assert told["after_warn"]["answer_skipped"] == pytest.approx(mean(shares(early, LAYERS)))
    assert told["change"]["risk"] == pytest.approx(-risk)


def test_the_alarm_is_told_at_the_answer_that_raised_it(folder: Path, other: DataConfig) -> None:
    rows = load_corpus(other, splits=("test",)).splits["test"]
    engine = engine_of(folder, OnDrift.full, rows=1)
    client = Client(engine, RequestOptions(tolerance=TOLERANCE))
    served = client.serve(rows)
    plain = engine_of(folder).generate([row.source for row in rows], tolerance=TOLERANCE)
    detector = ShiftDetector(Reference.of(client.artifact, client.asked), PER_ALARM)
    values = [share_skipped(answer.emission_layers, LAYERS) for answer in plain]
    expected = next(number for number, value in enumerate(values, start=1) if detector.saw(value))
    assert served.alarms == [expected]
    assert served.after == [False] * expected + [True] * (len(rows) - expected)
    assert served.thresholds == [client.asked] * expected + [1.0] * (len(rows) - expected)
    assert [trace.id for trace in served.traces] == [row.id for row in rows]


def test_an_alarm_on_usual_traffic_is_told_as_one(folder: Path, other: DataConfig, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "model"))
    (artifact,) = load_artifacts(own)
    wrong = tuple((min(0.95, share + 0.4), spread) for share, spread in artifact.article_skips)
    replace(artifact, article_skips=wrong).save(own / "calibration")
    drift.run(drift_config(own, other, n=40, on_drift=[OnDrift.full]), tmp_path)
    summary = summary_of(tmp_path)
    assert [told["on_drift"] for told in summary["actions"]] == ["warn", "full"]  # the former is compared with
    assert summary["requests"] == {"usual": 40, "traffic": 40}
    for told in summary["actions"]:
        assert told["alarm"]["phase"] == "usual" and told["alarms"]["usual"][0] == told["alarm"]["after"] <= 40
        assert told["before"] is None and told["after"]["requests"] == 40
    assert summary["clean"]["alarms"] == 5 and summary["clean"]["after"][0] > 0


def test_without_a_certificate_below_full_depth_there_is_one_error(
    folder: Path, other: DataConfig, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    shutil.rmtree(bare / "calibration")
    with pytest.raises(CalibrationError, match="no calibration risk; it has none; run python -m eval.calibrate"):
        drift.run(drift_config(bare, other), tmp_path)
    with pytest.raises(CalibrationError, match="was not tested at tolerance 0.2, only at 0.85, 0.01"):
        drift.run(drift_config(folder, other, tolerance=0.2), tmp_path)
    with pytest.raises(CalibrationError, match="only full depth is certified at tolerance 0.01"):
        drift.run(drift_config(folder, other, tolerance=NOTHING_PASSES), tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_without_other_traffic_the_choices_are_named(folder: Path, run_program: RunProgram) -> None:
    done = run_program("eval.drift", f"checkpoint={folder}", "hydra.run.dir=run")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "traffic=NAME (cnn_dailymail, debian" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 0},
        {"tolerance": 1.0},
        {"on_drift": []},
        {"on_drift": [OnDrift.full] * 2},
        {"requests_per_alarm": float("inf")},
        {"shuffles": 0},
        {"seed": -1},
    ],
)
def test_settings_have_their_ranges(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DriftConfig(**changes)


def test_shuffled_answers_alarm_where_their_mean_is_another() -> None:
    reference, values = Reference(0.5, 0.1, 1_000), [0.4, 0.6] * 200
    quiet = shuffled(reference, 1_000.0, values, 10, seed=0)
    assert (quiet["alarms"], quiet["after"], quiet["requests"]) == (0, None, 400) and quiet["log_evidence"] >= 0
    loud = shuffled(reference, 1_000.0, [value + 0.2 for value in values], 10, seed=0)
    least, median, most = loud["after"]
    assert loud["alarms"] == 10 and 1 < least <= median <= most <= 400
    assert loud == shuffled(reference, 1_000.0, [value + 0.2 for value in values], 10, seed=0)
    assert loud["after"] != shuffled(reference, 1_000.0, [value + 0.2 for value in values], 10, seed=1)["after"]


def test_spans_are_stretches_of_one_threshold() -> None:
    class Counts:
        def summary(self, scores: None, picks: range) -> dict[str, Any]:
            return {"requests": len(picks), "last": picks[-1]}

    found = spans([0.5, 0.5, 1.0, 0.5], (1.0, 0.5), Counts(), None)  # type: ignore[arg-type]
    assert [(each["first"], each["place"], each["requests"], each["last"]) for each in found] == [
        (0, 1, 2, 1), (2, 0, 1, 2), (3, 1, 1, 3)
    ]  # fmt: skip
