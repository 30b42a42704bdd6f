"""The prepared run for a GPU: every part goes through on a CPU, and nothing is called measured that was not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calm.config import Stepping
from calm.errors import ConfigError
from eval import gpu_answers, gpu_check, gpu_parts, gpu_timings
from eval.gpu_answers import Way
from eval.gpu_asked import Asked, asked_for
from eval.gpu_check import NOT_MEASURED, main
from eval.gpu_parts import GOALS, PARTS
from eval.gpu_simulated import simulated
from eval.gpu_timings import gaps
from tests.bare import bare_path
from tests.eval.carried import carry


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"out={tmp_path}"]) == gpu_check.FAILED
    found = record(tmp_path)
    assert {part["status"] for part in found["parts"].values()} == {NOT_MEASURED}
    assert {part["why"] for part in found["parts"].values()} == {"torch sees no CUDA device"}
    assert [goal["measured"] for goal in found["goals"]] == [None] * len(GOALS)
    assert f"asked 0.5, {NOT_MEASURED}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a dozen processes, each of which imports torch
def test_a_rehearsal_goes_through_every_part_on_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", bare_path(tmp_path))
    carried = carry(tmp_path / "carried", tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    assert main(["device=cpu", "shapes=tiny,tiny", f"out={out}", f"carried={carried}"]) == 0
    found = record(out)
    assert found["rehearsal"] and {part["status"] for part in found["parts"].values()} == {"measured"}
    assert [goal["measured"] for goal in found["goals"]] == [None] * len(GOALS)  # of a GPU it says nothing
    ways = found["parts"]["correctness"]["ways"]
    stepped = {f"{how} {rule}" for how in ("whole", "segments") for rule in ("own", "compact")}
    assert set(ways) == {"twins whole own", *stepped}
    assert all(way["different"] == 0 and way["same"] > 300 for way in ways.values())
    assert max(found["parts"]["correctness"]["bf16_changed"].values()) < 1
    ratios = found["parts"]["matrix"]["tiny"]["ratios"]
    assert {row["rule"] for row in ratios} == {"own", "compact", "sync"}
    told = [row["ratio"] for row in ratios if row["ratio"] is not None]  # a busy machine may leave none
    assert told and min(told) > 0
    assert all(row["predicted"] for row in found["parts"]["core"]["tiny"]["ratios"])
    it_has_learned(found["parts"]["learned"], out / "learned")


def it_has_learned(part: dict[str, Any], folder: Path) -> None:
    """A model was trained, certified and shown; its files are there."""
    training = part["training"]
    assert training["loss"][-1]["loss"] < training["loss"][0]["loss"]
    assert training["source_tokens_per_s"] > training["target_tokens_per_s"] > 0 < training["share_of_peak"] < 1
    assert {layer["layer"] for layer in part["classifier"]["layers"]} == set(range(1, 8))
    assert {each["measure"] for each in part["calibration"]["certificates"]} == {"softmax", "state", "classifier"}
    assert {"full", "static-half", "softmax", "state", "classifier", "oracle"} <= {
        row["row"] for row in part["table1"]["table1"]
    }
    assert {cell["batch"] for cell in part["figures"]["cells"]} == {1, 2} and not part["figures"]["missing"]
    drawn = {path.name for path in folder.rglob("*.png")}
    assert set(part["figures"]["figures"]) <= drawn and any("figure2" in name for name in drawn)
    for name in ("table1/table1.md", "table1/table1.csv", "table1/records.parquet", "summary.json"):
        assert (folder / name).is_file()


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*asked: Any) -> dict[str, Any]:
        raise RuntimeError("the card\nis gone")

    monkeypatch.setattr(gpu_check, "_in_a_process", lambda name, asked, seconds: gpu_check._measured(name, asked))
    monkeypatch.setitem(gpu_parts.PARTS, "core", breaks)
    monkeypatch.setitem(gpu_parts.PARTS, "gaps", lambda *asked: {"tiny whole": {"gap_share": 0.5}})
    assert main(["device=cpu", "parts=core,gaps", f"out={tmp_path}"]) == gpu_check.FAILED
    parts = record(tmp_path)["parts"]
    assert parts["core"]["status"] == "failed" and parts["core"]["why"].startswith("RuntimeError at test_gpu_check.py")
    assert "the card is gone" in parts["core"]["why"]
    assert parts["gaps"]["status"] == "measured" and parts["matrix"]["why"] == "not asked for"


def test_time_that_is_over_begins_no_part_and_ends_the_one_that_runs(tmp_path: Path) -> None:
    assert main(["device=cpu", "parts=gaps", "seconds=0", f"out={tmp_path}"]) == gpu_check.FAILED
    assert "were over before it could begin" in record(tmp_path)["parts"]["gaps"]["why"]
    assert main(["device=cpu", "parts=matrix", "seconds=0.2", f"out={tmp_path}"]) == gpu_check.FAILED
    assert "it was ended after" in record(tmp_path)["parts"]["matrix"]["why"]


def test_a_process_that_dies_is_a_part_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["device=cpu", "parts=gaps", f"out={tmp_path}"]) == gpu_check.FAILED
    assert "its process ended with status 1 and left no record" in record(tmp_path)["parts"]["gaps"]["why"]


def test_what_a_part_had_found_stays_when_its_process_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(command: list[str], timeout: float) -> Any:
        asked_for([word for word in command if "=" in word], list(PARTS)).keep({"tiny whole": {"gap_share": 0.5}})
        return SimpleNamespace(returncode=-11)

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(run=dies, TimeoutExpired=TimeoutError))
    assert main(["device=cpu", "parts=gaps", f"out={tmp_path}"]) == gpu_check.FAILED
    found = record(tmp_path)["parts"]["gaps"]
    assert found["status"] == "failed" and found["why"] == "its process ended with status -11"
    assert found["tiny whole"] == {"gap_share": 0.5} and not list(tmp_path.glob(".*.json"))


def test_what_a_part_had_found_stays_when_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(asked: Asked) -> dict[str, Any]:
        asked.keep({"small": 1})
        asked.keep({"base": 2})
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(gpu_check, "_in_a_process", lambda name, asked, seconds: gpu_check._measured(name, asked))
    monkeypatch.setitem(gpu_parts.PARTS, "core", breaks)
    assert main(["device=cpu", "parts=core", f"out={tmp_path}"]) == gpu_check.FAILED
    found = record(tmp_path)["parts"]["core"]
    assert (found["status"], found["small"], found["base"]) == ("failed", 1, 2) and "the card is gone" in found["why"]


def test_a_part_may_say_itself_that_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_in_a_process", lambda name, asked, seconds: gpu_check._measured(name, asked))
    wrong = {"status": "failed", "why": "off", "relative_errors": {"layer": 0.3}}
    monkeypatch.setitem(gpu_parts.PARTS, "kernels", lambda asked: wrong)
    assert main(["device=cpu", "parts=kernels", f"out={tmp_path}"]) == gpu_check.FAILED
    assert record(tmp_path)["parts"]["kernels"].items() >= wrong.items()


def test_what_the_same_code_has_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_in_a_process", lambda name, asked, seconds: {"status": "measured", "name": name})
    monkeypatch.setenv("CALM_COMMIT", "told")  # of a copy without git
    asked = ["device=cpu", f"out={tmp_path}"]
    assert main([*asked, "parts=core"]) == 0 and main([*asked, "parts=gaps"]) == 0
    parts = record(tmp_path)["parts"]
    assert {name for name, part in parts.items() if part["status"] == "measured"} == {"core", "gaps"}
    told = record(tmp_path)
    told["environment"]["git"] = {"commit": "another", "dirty": False}
    (tmp_path / "summary.json").write_text(json.dumps(told))
    main([*asked, "parts=gaps"])
    assert record(tmp_path)["parts"]["core"]["status"] == NOT_MEASURED


@pytest.mark.parametrize("wrong", ["device=tpu", "parts=cores", "seconds=long", "shapes=small", "out=", "x"])
def test_what_is_not_understood_is_said(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not understood; give device=cuda"):
        asked_for([wrong], list(PARTS))
    assert main([wrong]) == 2


def test_a_step_is_timed_where_its_row_leaves() -> None:
    found = gaps(Asked(device="cpu", shapes=["tiny", "tiny"]))
    layers = {name: (each["layers"], each["num_layers"]) for name, each in found.items()}
    assert layers == {
        f"tiny {how}{kind}": (ran, 8) for how in ("whole", "segments") for kind, ran in (("", 8), (" early", 2))
    }
    assert all(each["device_s"] > 0 and each["kernels"] is None for each in found.values())


@pytest.mark.slow
def test_branches_that_cannot_be_made_cost_their_own_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: str) -> list[Way]:
        return [Way(Stepping.whole), Way(Stepping.branches)]

    for module in (gpu_timings, gpu_answers):
        monkeypatch.setattr(module, "ways", refuses)
    told = "stepping=branches needs a GPU"
    asked = Asked(device="cpu", shapes=["tiny", "tiny"])
    found = gaps(asked)
    assert told in found["tiny branches"]["why"] and found["tiny whole"]["layers"] == 8
    found = gpu_answers.correctness(asked)
    assert told in found["impossible"]["branches own"] and set(found["ways"]) == {
        "whole own", "whole compact", "twins whole own"
    }  # fmt: skip


def test_every_batch_size_is_simulated_from_one_table() -> None:
    found = simulated(Asked(device="cpu", shapes=["tiny", "tiny"]))
    rows = found["tiny"]["rows"]
    cells = {(row["measure"], row["rule"], row["trace"], row["batch"]): row for row in rows}
    assert set(found) == {"tiny"} and len(cells) == len(rows) == 3 * 3 * 2 * len({1, 2, 4})
    assert all(row["decode_step_s"] > 0 and row["over_static"] > 0 for row in rows)
    for row in rows:
        assert row["over_full"] == pytest.approx(row["full_depth_s"] / row["decode_step_s"])
    assert len({row["full_depth_s"] for row in rows}) == 3  # one a batch size, whatever the exits


def test_goals_read_the_parts_as_they_are_written() -> None:
    """Of made-up records: each goal finds its figure, and only there."""
    entries = [{"name": "full", "ceiling": {"share_of_memory": 0.4}}, {"name": "state own tight"}]
    ratio = {"measure": "state", "trace": "tight", "against": "own-full", "clock": "decode", "predicted": 1.6}
    rows = [
        ratio | {"batch": b, "rule": r, "ratio": 1.2 + 0.1 * b} for b in (1, 8, 32) for r in ("own", "compact", "sync")
    ]
    shape = {"cells": [{"batch": b, "entries": entries} for b in (1, 64)], "ratios": rows}
    part = {"status": "measured", "small": shape, "base": shape, "small whole": {"gap_share": 0.1}}
    part["base whole"] = {"gap_share": 0.2}
    for name in ("small", "base"):
        steps = {"ours": 1.0, "compiled": 3.5, "eager": 7.0}
        part |= {f"{name} {how}": {"decode_s": seconds} for how, seconds in steps.items()}
    found = gpu_check.goals_of(dict.fromkeys(PARTS, part), Asked())
    measured = {goal["goal"]: goal["measured"] for goal in found}
    assert measured["base, batch 64: share of the floor"] == 0.4
    assert measured["base, batch 1: early exit over full"] == pytest.approx(1.3)
    assert measured["base, batch 8 sync: early exit over full"] == pytest.approx(2.0)
    assert measured["base, batch 1: early exit by its prediction"] == pytest.approx(1.3 / 1.6)
    assert measured["small, batch 1: 1 - gaps of a step"] == pytest.approx(0.9)
    assert measured["base, batch 1: over transformers, compiled"] == 3.5
    assert measured["small, batch 1: over transformers, eager"] == 7.0
    assert None not in measured.values()
    broken = part | {"base ours": {"decode_s": None}, "small ours": {"decode_s": 0.0}}  # what was no number is null
    left = {goal["goal"]: goal["measured"] for goal in gpu_check.goals_of(dict.fromkeys(PARTS, broken), Asked())}
    assert [name for name, value in left.items() if value is None] == [
        f"{shape}, batch 1: over transformers, {how}" for how in ("compiled", "eager") for shape in ("base", "small")
    ]
