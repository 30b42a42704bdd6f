"""The serving run: what is timed on what, sessions by their definition, ratios, predictions and the record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from calm.cli import settings
from calm.config import BatchRule, Consistency, DecoderName, Head, Measure, TraceKind
from calm.cost import CostTable
from calm.engine_config import ServingConfig
from calm.errors import CalmError, ConfigError, DataError
from calm.metrics import rouge_l_many
from calm.policies import Confident, Replay
from eval import calibrate, latency, throughput
from eval.clocks import Clocked, Noise
from eval.serving_cells import Cell
from eval.serving_result import CellResult
from eval.sessions import Session, at_equal_concurrency, between, interpolated, neighbours, session_of
from eval.workload import Workload, folder_workload, open_workload, shape_workload
from serve.requests import Answer, Reason, Status, Timing

from .conftest import TOLERANCE, calibration_config


def tiny_config(**changes: Any) -> ServingConfig:
    """Small enough for seconds; its clocks mean nothing, so noise is allowed."""
    values: dict[str, Any] = dict(
        shape="tiny", source_tokens=[6], batches=[1, 2], measures=[Measure.state],
        rules=[BatchRule.own, BatchRule.sync], few=2, many=6, repeats=1, warmups=0, attempts=1, predict=False,
        probe=False, allow_noisy=True,
    )  # fmt: skip
    return ServingConfig(**{**values, **changes})


def answer(name: str, arrived: float, first: float, ended: float, tokens: int, error: str = "") -> Answer:
    depths = (1,) * tokens
    timing = Timing(arrived, arrived, first, ended)
    status, reason = (Status.failed, Reason.failed) if error else (Status.finished, Reason.length)
    return Answer(
        name, status, reason, "", depths, False, depths, depths, depths, depths, 0, 0, timing, error=error
    )  # fmt: skip


def test_a_session_is_measured_as_the_paper_defines_it() -> None:
    found = session_of([answer("a", 1.0, 2.0, 6.0, 5), answer("b", 1.0, 3.0, 11.0, 3), answer("c", 2.0, 2.5, 2.5, 1)])
    assert (found.requests, found.tokens, found.seconds) == (3, 9, 10.0)
    assert found.tokens_per_s == pytest.approx(0.9)
    assert found.ttft == 1.0 and found.tpot == pytest.approx((4 / 4 + 8 / 2) / 2)
    assert found.inner_token_latency == pytest.approx((4 + 8 + 0) / 9)  # all tokens below, no first ones above
    assert found.concurrency == pytest.approx(12 / 10)
    with pytest.raises(CalmError, match="b: it broke"):
        session_of([answer("a", 0, 1, 2, 2), answer("b", 0, 0, 1, 0, "it broke")])


def test_a_depth_between_two_is_interpolated_round_by_round() -> None:
    seconds = {3: [3.0, 30.0], 4: [5.0, 50.0]}
    assert between(3.25, seconds.__getitem__) == [3.5, 35.0] and between(4.0, seconds.__getitem__) == [5.0, 50.0]
    assert neighbours(3.25) == (3, 4) and neighbours(4.0) == (4,)


def test_full_depths_latency_is_told_at_equal_concurrency() -> None:
    points = [(1.0, 10.0), (8.0, 24.0)]
    assert [interpolated(points, at) for at in (0.5, 1.0, 4.5, 8.0, 9.0)] == [10.0, 10.0, 17.0, 24.0, 24.0]
    entries: list[dict[str, Any]] = [
        {"ours": ours, "concurrency": at, "inner_token_latency": latency}
        for ours, at, latency in (("full", 8.0, 24.0), ("full", 1.0, 10.0), ("exit", 4.5, 6.0))
    ]
    at_equal_concurrency(entries)
    assert [each["full_latency_at_equal_concurrency"] for each in entries] == [24.0, 10.0, 17.0]


class LayersOnly(CostTable):
    """A layer takes a second, whatever its size, and nothing else does."""

    def at(self, name: str, size: int = 1) -> float:
        return float(name in ("layer", "layer_gathered"))


def measured(config: ServingConfig, batch: int) -> CellResult:
    cell = Cell(shape_workload(config, "tiny"), batch, 6)
    timed = cell.measure()
    return CellResult(
        cell, timed, {n: list(r.sessions) for n, r in cell.runs.items()}, [Noise(0.0)], {Head.full: LayersOnly({})}
    )


def test_everything_of_a_cell_is_timed_in_turn_on_engines_of_its_rules() -> None:
    config = tiny_config(repeats=2, warmups=1)
    result = measured(config, 2)
    runs = result.cell.runs
    mean = runs["state own tight"].depth(Clocked.call)
    assert list(runs)[:3] == ["full", "state own tight", "state sync tight"]
    assert {each.entry.depth for each in runs.values()} >= {None, *neighbours(mean)}
    assert runs["full"].engine is runs["state own tight"].engine is not runs["state sync tight"].engine
    assert set(result.paired.samples) == {*runs, "full (again)"}
    assert {name: len(sessions) for name, sessions in result.sessions.items()} == {
        name: 4 if name == "full" else 2 for name in runs
    }
    assert all(len(reply.tokens) == 6 for each in runs.values() for reply in each.answers)
    drawn = result.cell.workload.all_traces()["tight-state"]
    assert [reply.crossing_layers for reply in runs["state own tight"].answers] == list(drawn.depths[:2])
    assert mean == drawn.mean(0, 6, rows=2)
    together = runs["state sync tight"].answers
    assert [reply.emission_layers for reply in together] == [
        tuple(max(pair) for pair in zip(*drawn.depths[:2], strict=True))
    ] * 2


def test_predictions_are_the_simulators_and_stand_beside_every_ratio() -> None:
    result = measured(tiny_config(), 1)
    rows = result.ratios()
    assert [(row["against"], row["clock"], row["rule"]) for row in rows[:4]] == [
        ("own-full", "decode", "own"), ("static", "decode", "own"),
        ("own-full", "call", "own"), ("static", "call", "own"),
    ]  # fmt: skip
    mean = result.cell.runs["state own tight"].depth(Clocked.decode)
    assert rows[0]["predicted"] == pytest.approx(8 / mean) and rows[0]["mean_depth"] == mean
    assert rows[1]["predicted"] == pytest.approx(1.0)  # layers alone: a mean depth costs what static depth costs
    labels = {
        "ours",
        "measure",
        "head",
        "shape",
        "dtype",
        "source_tokens",
        "batch",
        "threads",
        "rule",
        "trace",
        "ratio",
    }
    assert labels <= set(rows[0]) and (rows[0]["ours"], rows[0]["shape"], rows[0]["batch"]) == ("exit", "tiny", 1)


def test_a_cell_that_stays_noisy_is_tried_again_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from eval import serving_cells

    cell = Cell(shape_workload(tiny_config(allow_noisy=False, attempts=3), "tiny"), 1, 6)
    tries: list[int] = []

    def noisy(*given: Any, **options: Any) -> Any:
        tries.append(1)
        return replace(quiet, noise=Noise(0.5))

    quiet = serving_cells.paired([serving_cells.Contender("full", lambda n: None)], 1, 2, 1, allow_noisy=True)
    monkeypatch.setattr(serving_cells, "paired", noisy)
    with pytest.raises(CalmError, match="others had 50.0%"):
        cell.measure()
    assert len(tries) == 3


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nobody looks at the machine; an empty working directory."""
    monkeypatch.setattr("eval.clocks.look", lambda: Noise(0.0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_run_gives_both_figures(unseen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        (unseen / name).mkdir()
    assert throughput.run(tiny_config(), unseen / "first") == 0
    printed = capsys.readouterr().out.splitlines()
    summary = json.loads(printed[-1])
    assert summary == json.loads((unseen / "first" / "summary.json").read_text())
    assert printed[0].startswith("model: shape tiny, random weights; depths replayed from traces (tight)")
    assert (
        summary["figures"] == ["figure1_tiny_6_tight.png"] and (unseen / "first" / "figure1_tiny_6_tight.png").is_file()
    )
    assert [(cell["batch"], len(cell["noise"])) for cell in summary["cells"]] == [(1, 1), (2, 1)]
    names = ("tokens_per_s", "ttft", "tpot", "inner_token_latency", "concurrency", "full_latency_at_equal_concurrency")
    for cell in summary["cells"]:
        for entry in cell["entries"]:
            assert all(entry[name] > 0 for name in names) and entry["concurrency"] <= cell["batch"]
    assert {row["against"] for row in summary["ratios"]} == {"own-full", "static"}
    assert summary["traces"]["tight-state"]["wanted"] == pytest.approx(8 * (1 - 0.5653))
    samples = pq.read_table(unseen / "first" / "samples.parquet").to_pylist()
    assert {row["kind"] for row in samples} == {"clock", "session"}
    assert any(row["name"] == "full (again)" and row["many_s"] > 0 for row in samples)
    assert json.loads((unseen / "first" / "traces.json").read_text())["tight-state"]["kind"] == "tight"
    drawn = ServingConfig(summary=str(unseen / "first" / "summary.json"))
    assert latency.run(drawn, unseen / "second") == 0
    assert (unseen / "second" / "figure2_tiny_6_tight.png").is_file()


def test_what_is_measured_is_kept_and_what_is_not_is_told(unseen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eval import serving_run

    measure, asked = serving_run.one_cell, list[int]()

    def one_cell(workload: Workload, batch: int, source: int | None) -> CellResult:
        asked.append(batch)
        if batch == 2 and len(asked) < 3:
            raise CalmError("this machine is too busy")
        return measure(workload, batch, source)

    monkeypatch.setattr(serving_run, "one_cell", one_cell)
    config = tiny_config(batches=[1, 2])
    run_dir = unseen / "run"
    run_dir.mkdir()
    assert throughput.run(config, run_dir) == serving_run.UNFINISHED
    first = json.loads((run_dir / "summary.json").read_text())
    assert first["missing"] == {"s6-b2": "this machine is too busy"}
    assert [cell["batch"] for cell in first["cells"]] == [1]
    assert throughput.run(config, run_dir) == 0
    second = json.loads((run_dir / "summary.json").read_text())
    assert asked == [1, 2, 2] and second["missing"] == {}
    names = ("name", "tokens_per_s", "decode_s", "call_s")
    before, after = ([{n: e[n] for n in names} for e in each["cells"][0]["entries"]] for each in (first, second))
    assert before == after and len(second["cells"]) == 2
    assert second["ratios"][: len(first["ratios"])] == first["ratios"] and second["traces"] == first["traces"]
    assert throughput.run(replace(config, seed=1), run_dir) == 0
    assert asked == [1, 2, 2, 1, 2]  # another seed is another measurement
    monkeypatch.setattr(serving_run, "one_cell", lambda *given: pytest.fail("nothing was left to measure"))
    assert throughput.run(replace(config, attempts=7), run_dir) == 0


def test_a_run_without_any_cell_is_an_error(unseen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise CalmError("too busy")

    monkeypatch.setattr("eval.serving_run.one_cell", refuse)
    with pytest.raises(CalmError, match="s6-b1: too busy; s6-b2: too busy"):
        throughput.run(tiny_config(), unseen)


def test_a_busy_machine_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("eval.clocks.look", lambda: Noise(0.4))
    monkeypatch.setattr("eval.workload.open_workload", lambda config: pytest.fail("a model was opened"))
    with pytest.raises(CalmError, match="too busy to time anything: others had 40.0%"):
        throughput.run(tiny_config(allow_noisy=False), tmp_path)


def test_what_is_no_record_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    for path in ("x.json", "nothing.json"):
        with pytest.raises(DataError, match="no summary.json of eval.throughput"):
            throughput.run(ServingConfig(summary=str(tmp_path / path)), tmp_path)


def test_without_a_choice_the_newest_folder_counts_and_else_a_shape(
    unseen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eval.workload.shape_workload", lambda config, shape: shape)
    monkeypatch.setattr("eval.workload.folder_workload", lambda config, folder: folder)
    assert open_workload(ServingConfig()) == "small"
    assert "no trained model under runs/" in capsys.readouterr().out
    folder = unseen / "runs" / "x" / "model"
    folder.mkdir(parents=True)
    for name in ("MANIFEST.json", "early_exit.json", "model.safetensors"):
        (folder / name).touch()
    assert open_workload(ServingConfig()) == Path("runs/x/model")
    assert open_workload(ServingConfig(shape="base")) == "base"


def test_a_trained_folder_is_timed_at_its_certified_thresholds(certified: Path) -> None:
    config = tiny_config(
        shape=None, tolerance=TOLERANCE, measures=[Measure.softmax, Measure.state, Measure.entropy], n=5, batches=[2]
    )
    workload = folder_workload(config, certified / "model")
    told = workload.about["thresholds"]
    assert workload.trained and workload.many == 6 and len(workload.articles) == 5
    assert set(workload.policies) == {(Measure.softmax, Head.full), (Measure.state, Head.full)}
    assert any("entropy: neither certified nor given" in note for note in workload.notes)
    artifact = next(a for a in workload.model.artifacts if a.measure is Measure.state)
    if artifact.certificate(TOLERANCE).certified_below_one:
        assert workload.policies[Measure.state, Head.full] == artifact.policy(artifact.threshold_for(TOLERANCE))
        assert told["state"] == {"threshold": artifact.threshold_for(TOLERANCE), "certified_for": TOLERANCE}
    cell = Cell(workload, 2, None)
    sessions, noise = cell.serve()
    assert {name for name in sessions if not name.startswith("static")} == {
        "full", *(f"{m} {r} live" for m in ("softmax", "state") for r in ("own", "sync"))
    }  # fmt: skip
    full = sessions["full"][0]
    assert isinstance(full, Session) and full.requests == 5 and full.concurrency <= 2.0
    assert noise.foreign >= 0.0
    assert "static-2" in sessions  # half of four layers, in any case
    found = cell.runs["full"].rouge_l()
    articles = [article.target for article in workload.articles]
    right = rouge_l_many([reply.text for reply in cell.runs["full"].served], articles)
    assert found["rouge_l"] == pytest.approx(float(right.mean()))
    assert found["rouge_l_low"] <= found["rouge_l"] <= found["rouge_l_high"]


def test_a_measure_is_timed_with_every_head_at_the_threshold_certified_for_it(own_copy: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"decoder": DecoderName.engine, "head": Head.candidates, "head_k": 9}
    for each in ({}, changes):
        config = calibration_config(own_copy, measures=[Measure.softmax, Measure.state], tolerances=[0.7], **each)
        assert calibrate.run(config, tmp_path) == 0
    assert (own_copy / "calibration" / "softmax-risk-candidates9.json").is_file()
    assert (own_copy / "calibration" / "softmax-risk.json").is_file()
    config = tiny_config(
        shape=None, tolerance=0.7, measures=[Measure.softmax, Measure.state], n=5, batches=[2],
        rules=[BatchRule.own], exit_heads=[Head.full, Head.candidates], head_k=9,
    )  # fmt: skip
    workload = folder_workload(config, own_copy)
    by_head = {a.identity.head: a for a in workload.model.artifacts if a.measure is Measure.softmax}
    for head in (Head.full, Head.candidates):
        artifact = by_head[head.value]
        assert workload.policies[Measure.softmax, head] == artifact.policy(artifact.threshold_for(0.7))
    names = ["full", "softmax own live", "softmax own live candidates", "state own live"]
    assert [entry.name for entry in workload.entries()] == names
    told = workload.about["thresholds"]
    assert {told[name]["certified_for"] for name in ("softmax", "softmax candidates", "state")} == {0.7}
    cell = Cell(workload, 2, None)
    heads = {name: runs.engine.options.head for name, runs in cell.runs.items()}
    assert heads["softmax own live candidates"] is Head.candidates
    assert {heads[name] for name in ("full", "softmax own live", "state own live", "static-2")} == {Head.full}


def test_a_threshold_certified_for_another_way_of_decoding_is_used_and_said(own_copy: Path, tmp_path: Path) -> None:
    calibrate.run(calibration_config(own_copy, measures=[Measure.softmax], tolerances=[0.7]), tmp_path)
    config = tiny_config(shape=None, tolerance=0.7, measures=[Measure.softmax], n=5, batches=[2], head=Head.candidates)
    workload = folder_workload(config, own_copy)
    told = workload.about["thresholds"]["softmax"]
    assert told["certified_for"] is None and told["threshold"] < 1
    assert any("not as it is decoded here (head: " in note for note in workload.notes)


def test_papers_thresholds_stand_in_where_nothing_is_certified(certified: Path) -> None:
    config = tiny_config(shape=None, measures=[Measure.state], consistency=Consistency.textual, batches=[1])
    workload = folder_workload(config, certified / "model")
    policy = workload.policies[Measure.state, Head.full]
    assert isinstance(policy, Confident) and policy.schedule.threshold == 0.95
    assert any("the paper's threshold 0.95 instead" in note for note in workload.notes)


def test_shapes_replay_traces_with_their_measure() -> None:
    workload: Workload = shape_workload(tiny_config(traces=[TraceKind.tight, TraceKind.wide]), "tiny")
    names = [entry.name for entry in workload.entries()]
    assert names == ["full", *(f"state {rule} {trace}" for trace in ("tight", "wide") for rule in ("own", "sync"))]
    policy = workload.policy(workload.entries()[1], ["r0", "r1"])
    assert isinstance(policy, Replay) and policy.measure is Measure.state
    assert [len(source) for source in workload.sources(2, 6)] == [6, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "small", "checkpoint": "x"}, "exclude each other"),
        ({"shape": "huge"}, "'huge' is none"),
        ({"dtype": "fp16"}, "'fp16' is none; choose from fp32, bf16, int8"),
        ({"few": 8, "many": 8}, "many must lie"),
        ({"batches": []}, "batches needs at least one"),
        ({"rules": [BatchRule.own, BatchRule.own]}, "none twice"),
        ({"traces": [TraceKind.measured]}, "needs records="),
        ({"traces": [TraceKind.static]}, "always timed"),
        ({"attempts": 0}, "attempts must lie"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServingConfig(**changes)


@pytest.mark.parametrize("program", ["throughput", "latency"])
def test_both_programs_take_the_same_settings(program: str) -> None:
    config = settings(program, ServingConfig, ["shape=small", "dtype=int8", "batches=[1,8]", "traces=[tight,wide]"])
    assert (config.shape, config.batches, config.data) == ("small", [1, 8], None)
    assert config.traces == [TraceKind.tight, TraceKind.wide]
