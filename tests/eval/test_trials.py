"""Trials of an experiment: measured once, taken from the folder after that, and one that fails leaves the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from calm.errors import CalmError
from eval.trials import Ledger, Trial


def silent(line: str) -> None:
    pass


def counted(calls: list[str], name: str, rows: Any = None) -> Trial:
    def measure() -> Any:
        calls.append(name)
        if isinstance(rows, Exception):
            raise rows
        return rows or [{"value": len(name)}]

    return Trial({"name": name, "share": 0.5}, measure)


def test_what_is_done_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[str] = []
    trials = [counted(calls, "a"), counted(calls, "bb", [{"value": 1}, {"value": 2}])]
    for _ in range(2):
        found = Ledger(tmp_path, {"n": 1}).run(trials, "test", silent)
        assert found.rows == [
            {"name": "a", "share": 0.5, "value": 1},
            {"name": "bb", "share": 0.5, "value": 1},
            {"name": "bb", "share": 0.5, "value": 2},
        ]
    assert calls == ["a", "bb"]
    Ledger(tmp_path, {"n": 2}).run(trials, "test", silent)
    assert calls == ["a", "bb", "a", "bb"]  # what is asked for is another thing


def test_one_that_fails_says_why_and_is_tried_again(tmp_path: Path) -> None:
    calls: list[str] = []
    said: list[str] = []
    found = Ledger(tmp_path, {}).run(
        [counted(calls, "a", CalmError("too busy")), counted(calls, "b")], "t", said.append
    )
    assert found.failed == {"a-0.5": "too busy"} and [row["name"] for row in found.rows] == ["b"]
    assert said == ["a-0.5: failed: too busy"]
    found = Ledger(tmp_path, {}).run([counted(calls, "a"), counted(calls, "b")], "t", silent)
    assert not found.failed and calls == ["a", "b", "a"]


def test_one_that_was_running_when_the_process_ended_is_measured_anew(tmp_path: Path) -> None:
    calls: list[str] = []
    ledger = Ledger(tmp_path, {})

    def stopped() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.run([counted(calls, "a", [{"value": 1}]), Trial({"name": "b"}, stopped)], "t", silent)
    assert json.loads((ledger.folder / "b.json").read_text())["state"] == "running"
    trials = [counted(calls, "a"), Trial({"name": "b"}, lambda: [{"value": 3}])]
    found = Ledger(tmp_path, {}).run(trials, "t", silent)
    assert calls == ["a"] and [row["value"] for row in found.rows] == [1, 3]


def test_a_name_is_a_file_s() -> None:
    assert (
        Trial({"row": "softmax@0.85", "rule": "quantile 0.5", "share": None}, list).name
        == "softmax_0.85-quantile_0.5-None"
    )
