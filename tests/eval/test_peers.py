"""eval.peers: who is timed against whom, ratios from made-up samples, and the program over made-up peers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from calm.cli import settings
from calm.config import BatchRule, Head, Measure, RunnerName, TraceKind
from calm.engine_config import PeersConfig
from calm.errors import CalmError, CheckpointError, ConfigError, DataError
from eval import clocks, peer_plan, peers
from eval.peer_case import Model, drawn_depths
from eval.peer_crew import Crew
from eval.peer_plan import Case, Depths, Entrant, WorkerPlan, cases, our_entrants, our_workers, peer_workers
from eval.peer_ratios import Samples, Table, as_text, interpolated, quotient
from eval.peer_text import first_difference, parity, until

FAKE = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
LABELS = {"shape": "small", "source_tokens": 128, "batch": 2, "threads": 1}
DEPTHS = Depths(TraceKind.tight, "state", ((3, 4), (4, 4)), decode=3.25, call=3.5)


def entrants() -> list[Entrant]:
    config = PeersConfig(
        dtypes=["bf16", "int8"], heads=[Head.full], rules=[BatchRule.compact], traces=[TraceKind.tight]
    )
    plans = [plan for plan in peer_plan.ALL_WORKERS if plan.name in ("transformers-fp32", "transformers-bf16")]
    return [*our_entrants(config, [DEPTHS], 8), *map(peer_plan.peer_entrant, plans)]


def samples(**per_token: float) -> Samples:
    """Two rounds, the second twice as slow; a call is ten seconds and its tokens."""
    seconds = {
        name: [(10 + 8 * each, 10 + 40 * each), (20 + 16 * each, 20 + 80 * each)] for name, each in per_token.items()
    }
    return Samples(8, 40, seconds)


TIMES: dict[str, float] = {
    "ours-bf16-full-full": 2.0, "ours-int8-full-full": 1.0, "ours-int8-compact-tight-state-full": 0.5,
    "ours-int8-static-3-full": 0.4, "ours-int8-static-4-full": 0.8,
    "transformers-fp32": 6.0, "transformers-bf16": 4.0,
}  # fmt: skip


def table(predicted: dict[str, float] | None = None, **times: float) -> list[dict[str, Any]]:
    made = samples(**{**TIMES, **times})
    taking_part = [each for each in entrants() if each.name in made.seconds]
    return Table(LABELS, taking_part, made, [DEPTHS], 8, predicted or {}).rows()


def pick(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


def test_ratios_are_the_others_time_over_ours_by_the_faster_of_its_arithmetics() -> None:
    rows = table()
    best = pick(rows, ours="full", against="transformers", clock="decode", dtype="int8")
    assert best["ratio"] == best["low"] == best["high"] == pytest.approx(4.0)
    assert (best["peer"], best["fastest"], best["ours_ms"]) == ("transformers-bf16", True, pytest.approx(1500.0))
    assert {name: best[name] for name in LABELS} == LABELS
    assert (best["head"], best["measure"], best["rule"], best["trace"]) == ("full", None, None, None)
    slower = pick(rows, ours="full", against="transformers", clock="decode", dtype="bf16")
    assert slower["ratio"] == pytest.approx(2.0) and not slower["fastest"]
    whole = pick(rows, ours="full", against="transformers", clock="call", dtype="int8")
    assert whole["ratio"] == pytest.approx(170 / 50)
    early = pick(rows, ours="exit", against="transformers", clock="decode")
    assert early["ratio"] == pytest.approx(8.0) and early["measure"] == "state"


def test_exits_are_held_against_our_own_full_depth_and_static_depth_of_the_same_mean() -> None:
    predicted = {
        "ours-int8-full-full": 3.0, "ours-int8-compact-tight-state-full": 1.5,
        "ours-int8-static-3-full": 1.0, "ours-int8-static-4-full": 2.0,
    }  # fmt: skip
    rows = table(predicted)
    own = pick(rows, against="own-full", clock="decode")
    assert (own["ours"], own["ratio"], own["predicted"]) == ("exit", pytest.approx(2.0), pytest.approx(2.0))
    assert (own["dtype"], own["rule"], own["trace"]) == ("int8", "compact", "tight")
    static = pick(rows, against="static", clock="decode")
    assert static["ratio"] == pytest.approx((0.75 * 0.4 + 0.25 * 0.8) / 0.5)
    assert static["predicted"] == pytest.approx(1.25 / 1.5) and static["peer"] == "static-3.250"
    whole = pick(rows, against="static", clock="call")  # its mean is over all tokens
    assert whole["ratio"] == pytest.approx((0.5 * 26 + 0.5 * 42) / 30) and whole["predicted"] is None


def test_without_a_prediction_or_the_static_depths_there_is_none() -> None:
    made = {name: value for name, value in TIMES.items() if name != "ours-int8-static-4-full"}
    taking_part = [each for each in entrants() if each.name in made]
    rows = Table(LABELS, taking_part, samples(**made), [DEPTHS], 8, {"ours-int8-full-full": 3.0}).rows()
    assert pick(rows, against="own-full", clock="decode")["predicted"] is None
    assert not [row for row in rows if row["against"] == "static"]


def test_rounds_that_noise_spoilt_do_not_count() -> None:
    assert quotient([4.0, -1.0, 8.0], [2.0, 1.0, 2.0]) == {"ratio": 3.0, "low": 2.5, "high": 3.5}
    assert quotient([4.0, -1.0, 8.0], [0.0, 1.0, 2.0])["ratio"] is None
    assert quotient([6.0], [2.0]) == {"ratio": 3.0, "low": 3.0, "high": 3.0}
    assert interpolated([1.0, 2.0], [3.0, 6.0], 0.25) == [1.5, 3.0]


def test_the_table_for_people_has_the_cases_apart() -> None:
    rows = [{**row, "noisy": False} for row in table()]
    lines = as_text([*rows, *({**row, "batch": 8} for row in rows)]).splitlines()
    heads = [line for line in lines if line.startswith("small shape")]
    assert heads[1] == "small shape, source 128, batch 8, threads 1; clock: decode" and len(heads) == 2
    assert sum("own-full" in line for line in lines) == 2 and sum("4.00" in line for line in lines) >= 2


def test_the_core_set_and_how_it_is_cut_down() -> None:
    every = cases(PeersConfig())
    assert len(every) == 8 and Case("base", 128, 8, 1) in every and Case("base", 512, 8, 1) not in every
    few = PeersConfig(shapes=["small"], sources=[128], batches=[8], peers=["openvino"], dtypes=["int8"])
    assert cases(few) == [Case("small", 128, 8, 1)]
    assert [plan.name for plan in peer_workers(few)] == ["openvino-fp32", "openvino-int8"]
    assert [plan.name for plan in our_workers(few)] == ["ours-int8"]
    assert [(case.source, case.batch) for case in cases(few, "model")] == [(0, 8)]
    assert {plan.against for plan in peer_plan.ALL_WORKERS} == set(PeersConfig().peers)


def test_a_record_is_known_again_unless_what_is_measured_changes() -> None:
    config = PeersConfig()
    case = cases(config)[0]
    key = case.key(config)
    assert key.startswith("small-s128-b1-t1-")
    assert case.key(replace(config, batches=[1], call_timeout=5.0, allow_noisy=True)) == key
    assert case.key(replace(config, repeats=3)) != key != case.key(replace(config, peers=["openvino"]))


def test_candidates_speak_with_the_full_head_where_nothing_is_asked() -> None:
    config = PeersConfig(dtypes=["int8"], heads=[Head.screened], exit_heads=[Head.candidates], rules=[BatchRule.own])
    found = our_entrants(config, [DEPTHS], 8)
    assert [(each.role, each.head) for each in found] == [
        ("full", "screened"), ("full", "full"), ("exit", "candidates"), ("static", "full"), ("static", "full")
    ]  # fmt: skip
    told = peer_plan.variant_settings(found[2], [DEPTHS])
    assert told["policy"] == {"kind": "replay", "layers": [[3, 4], [4, 4]], "measure": "state"}
    assert peer_plan.variant_settings(found[3], [DEPTHS])["policy"] == {"kind": "static", "layer": 3}


def test_drawn_depths_have_the_papers_mean_and_both_windows() -> None:
    config = PeersConfig(few=10, many=200, measures=[Measure.state, Measure.softmax])
    found = drawn_depths(config, Model("small", 8, 100, 1, "t5-v1_1-small"), 32)
    assert [(each.trace.value, each.measure) for each in found] == [
        ("tight", "state"), ("wide", "state"), ("tight", "softmax"), ("wide", "softmax")
    ]  # fmt: skip
    for tight, wide in (found[:2], found[2:]):
        assert tight.call == pytest.approx(wide.call, abs=0.1)
        assert tight.call == pytest.approx(tight.decode, abs=0.1)
    assert len(found[0].rows) == 32 and len(found[0].rows[0]) == 200


def test_answers_are_compared_to_their_end() -> None:
    assert until([5, 6, 1, 0, 0], 1) == [5, 6] == until([5, 6], 1)
    assert first_difference([5, 6], [5, 6]) is None
    assert first_difference([5, 6], [5, 7]) == 1 and first_difference([5, 6], [5, 6, 7]) == 2
    answers = {"transformers-fp32": [[5, 6, 1, 0], [7, 1]], "other": [[5, 6], [7, 8, 1]]}
    told = parity(answers, 1)
    assert told["transformers-fp32"] == {"rows": 2, "equal": 2, "first_difference": None}
    assert told["other"] == {"rows": 2, "equal": 1, "first_difference": {"row": 1, "step": 1}}
    assert parity({"other": [[5]]}, 1) == {}


def test_settings_are_checked() -> None:
    made = settings("peers", PeersConfig, ["shapes=[tiny]", "peers=[ctranslate2-int8]", "traces=[wide]"])
    assert (made.shapes, made.peers, made.traces) == (["tiny"], ["ctranslate2-int8"], [TraceKind.wide])
    for wrong in (
        {"peers": ["vllm"]}, {"dtypes": ["fp16"]}, {"batches": []}, {"sources": [1]}, {"many": 8},
        {"traces": [TraceKind.measured]}, {"repeats": 0}, {"call_timeout": 0.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PeersConfig(**wrong)


def test_a_folder_that_is_no_t5_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"its config.json is not that of a T5"):
        peers.describe(tmp_path, None)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeersConfig:
    """A shape of no weights, and peers of which one is sound, one dies while it is timed and one is not installed."""
    folder = tmp_path / "tiny-0"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_layers": 8, "vocab_size": 50, "eos_token_id": 1}')
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(peers, "shape_folder", lambda shape, work, seed: folder)
    monkeypatch.setattr(peer_plan.WorkerPlan, "command", lambda self, environments: FAKE)
    workers = (
        WorkerPlan("transformers-fp32", "transformers", "hf", "fp32"),
        WorkerPlan("ctranslate2-int8", "ctranslate2-int8", "ct2", "int8", None, {"decode": "die"}),
        WorkerPlan("onnxruntime-fp32", "onnxruntime", "ort", "fp32", "onnxruntime"),
    )
    monkeypatch.setattr(peer_plan, "ALL_WORKERS", workers)
    return PeersConfig(
        shapes=["tiny"], sources=[8], batches=[2], dtypes=["int8"], heads=[Head.full], rules=[BatchRule.own],
        traces=[TraceKind.tight], few=2, many=6, repeats=3, allow_noisy=True, environments=str(tmp_path / "peers"),
    )  # fmt: skip


def test_a_run_leaves_ratios_samples_and_why_peers_are_missing(
    made_up: PeersConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    assert peers.run(made_up, run_dir) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    (case,) = summary["cases"]
    assert "ended with exit status 3 at 'decode'" in case["failures"]["ctranslate2-int8"]
    assert "no environment" in case["failures"]["onnxruntime-fp32"]
    assert case["parity"]["ours-int8"] == {"rows": 2, "equal": 2, "first_difference": None}
    assert set(case["peers"]) == {"transformers-fp32", "ours-int8"} and case["no_prediction"] is None
    assert {row["against"] for row in summary["ratios"]} == {"transformers", "own-full", "static"}
    own = pick(summary["ratios"], against="own-full", clock="decode")
    assert own["predicted"] == pytest.approx(2.0) and own["source_tokens"] == 8
    timed = pq.read_table(run_dir / "samples.parquet").to_pylist()
    assert {row["tokens"] for row in timed} == {2, 6} and {row["round"] for row in timed} == {0, 1, 2}
    assert len(timed) == 3 * 2 * (1 + len({row["contender"] for row in timed if "again" not in row["contender"]}))

    def nobody(self: Crew, plans: object, told: object) -> None:
        raise AssertionError("a case that is in the ledger is measured again")

    monkeypatch.setattr(Crew, "start", nobody)
    assert peers.run(made_up, run_dir) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["ratios"] == summary["ratios"]


def test_a_run_without_ours_says_so_and_ends_with_its_own_status(
    made_up: PeersConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [WorkerPlan("ours-int8", "ours", "ours", "int8", None, {"load": "fail"})]
    monkeypatch.setattr(peer_plan, "our_workers", lambda config: broken)
    assert peers.run(made_up, tmp_path / "run") == peers.UNFINISHED
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["ratios"] == [] and len(summary["missing"]) == 1
    assert "nothing of ours runs (ours-int8: ValueError: cannot load)" in next(iter(summary["missing"].values()))


def test_a_disturbed_case_is_tried_again_and_then_left_out(
    made_up: PeersConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true, tries = clocks.paired, []

    def disturbed(*args: Any, **named: Any) -> clocks.Paired:
        tries.append(1)
        if len(tries) == 2:
            return true(*args, **named)
        raise CalmError("this machine is too busy to time anything")

    monkeypatch.setattr(clocks, "paired", disturbed)
    monkeypatch.setattr(peer_plan, "ALL_WORKERS", peer_plan.ALL_WORKERS[:1])
    assert peers.run(replace(made_up, attempts=2), tmp_path / "second") == 0 and len(tries) == 2
    assert peers.run(replace(made_up, attempts=1), tmp_path / "none") == peers.UNFINISHED and len(tries) == 3
    told = capsys.readouterr().out.splitlines()
    assert any(line.endswith("not measured: this machine is too busy to time anything") for line in told)
    assert json.loads(told[-1])["ratios"] == []


@pytest.mark.slow
def test_real_peers_answer_alike_and_give_what_is_asked(tmp_path: Path) -> None:
    """transformers, CTranslate2 and ours in processes of their own, on a random model."""
    from eval.shapes import random_sources

    folder = peers.shape_folder("tiny", tmp_path, 0)
    config = PeersConfig(shapes=["tiny"], dtypes=["fp32"], exit_dtypes=["fp32"], runner=RunnerName.auto)
    model = peers.describe(folder, "tiny")
    sources = random_sources(model.vocab_size, 3, 12, 0, model.eos)
    names = ("transformers-fp32", "transformers-bf16", "ctranslate2-fp32", "ctranslate2-int8")
    plans = [plan for plan in peer_plan.ALL_WORKERS if plan.name in names] + our_workers(config)
    depths = drawn_depths(config, model, 3)
    ours = our_entrants(config, depths, model.num_layers)
    variants = {"ours-fp32": {each.variant: peer_plan.variant_settings(each, depths) for each in ours}}
    with Crew(config, folder, tmp_path / "store", tmp_path / "logs") as crew:
        crew.start(plans, print)
        assert crew.failures == {}
        crew.prepare(sources, config.many, variants)
        same = parity(crew.answers(sources, 24), model.eos)
        for name in ("ctranslate2-fp32", "ours-fp32"):
            assert same[name] == {"rows": 3, "equal": 3, "first_difference": None}
        for entrant in [*ours, *(peer_plan.peer_entrant(plan) for plan in plans if plan.against != "ours")]:
            for tokens in (1, 8, 40):
                crew.decoder(entrant.worker, entrant.variant, 3)(tokens)
    assert (tmp_path / "store" / "ctranslate2-int8").is_dir()


def record(path: Path, batch: int, **others: Any) -> str:
    rows = [row | {"batch": batch} for row in table()]
    values = {"started": "", "wall_s": 1.0, "argv": [f"batches=[{batch}]"], "config": {}, "environment": {}}
    told = {"program": "eval.peers", **values, "ratios": rows, "cases": [{"batch": batch}], "missing": {}, **others}
    path.write_text(json.dumps(told))
    return str(path)


def test_records_of_several_runs_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [record(tmp_path / "a.json", 1), record(tmp_path / "b.json", 8, missing={"small-s1-b8": "noise"})]
    assert peers.run(PeersConfig(merge=parts), tmp_path) == 0
    told = json.loads((tmp_path / "summary.json").read_text())
    assert [run["argv"] for run in told["runs"]] == [["batches=[1]"], ["batches=[8]"]]
    assert {row["batch"] for row in told["ratios"]} == {1, 8} and len(told["ratios"]) == 2 * len(table())
    assert told["cases"] == [{"batch": 1}, {"batch": 8}] and told["missing"] == {"small-s1-b8": "noise"}
    capsys.readouterr()
    with pytest.raises(ConfigError, match="both have"):
        peers.run(PeersConfig(merge=[parts[0], parts[0]]), tmp_path)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(DataError, match="is no summary.json of eval.peers"):
        peers.run(PeersConfig(merge=[str(tmp_path / "c.json")]), tmp_path)
