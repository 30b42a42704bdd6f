"""eval.engine_rules: row-exact rules repeat the batch decoder, and what is counted as a near tie is one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calm.config import BatchRule, Consistency, EngineRulesConfig, Measure, Schedule
from calm.errors import CalibrationError
from calm.policies import Confident
from calm.records import DecodeTrace
from calm.thresholds import ThresholdSchedule
from eval import engine_rules

from .conftest import TOLERANCE


def rules_config(folder: Path, rules: list[BatchRule]) -> EngineRulesConfig:
    return EngineRulesConfig(
        str(folder), n=24, measure=Measure.state, tolerance=TOLERANCE, rules=rules, batch_sizes=[1, 4], processes=1
    )


def test_row_exact_rules_keep_the_risk_and_coupled_rules_are_told_apart(certified: Path, tmp_path: Path) -> None:
    config = rules_config(certified / "model", [BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.sync])
    assert engine_rules.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    reference, *rows = summary["rules"]
    assert [(row["rule"], row["batch"]) for row in rows[-2:]] == [("sync", 1), ("sync", 4)] and len(rows) == 8
    assert 0 < reference["risk"] <= reference["risk_high"] and reference["skipped"] > 0
    for row in rows[:6]:
        assert row["changed"] == row["near_ties"] == 0
        assert (row["risk"], row["rouge_l"], row["skipped"]) == pytest.approx(
            (reference["risk"], reference["rouge_l"], reference["skipped"])
        )
    alone, together = rows[6:]
    assert alone["changed"] == 0  # one row has nobody to wait for
    assert together["skipped"] < reference["skipped"] and together["changed"] > 0
    table = (tmp_path / "engine_rules.md").read_text().splitlines()
    assert len(table) == 2 + len(summary["rules"]) and table[-1].startswith("| engine | sync | 4 |")


def test_a_model_without_that_calibration_is_one_error(certified: Path, tmp_path: Path) -> None:
    config = replace(rules_config(certified / "model", [BatchRule.own]), consistency=Consistency.textual)
    with pytest.raises(CalibrationError, match="no calibration of state for textual consistency; run python -m"):
        engine_rules.run(config, tmp_path)


def trace(tokens: list[int], confidences: list[tuple[float, ...]], depth: int = 1) -> DecodeTrace:
    depths = (1,) * (len(tokens) - 1) + (depth,)
    return DecodeTrace("r", tuple(tokens), "", depths, depths, depths, depths, tuple(confidences), True)


def test_a_near_tie_is_a_confidence_at_its_threshold_before_the_answers_part() -> None:
    policy = Confident(Measure.softmax, ThresholdSchedule(0.5, Schedule.constant))
    nan, at, far = float("nan"), 0.5 * (1 + 5e-6), 0.9
    reference = trace([4, 5, 6], [(far, nan), (at, nan), (far, nan)])
    assert engine_rules.near_tie(trace([4, 7, 6], []), reference, policy)
    assert not engine_rules.near_tie(trace([9, 5, 6], []), reference, policy)  # they had parted before
    late = trace([4, 5, 6], [(far, nan), (far, nan), (at, nan)])
    assert engine_rules.near_tie(trace([4, 5, 6], [], depth=2), late, policy)  # equal tokens from other depths
    assert not engine_rules.near_tie(trace([4, 7, 6], []), late, policy)  # they part before the tie
    assert not engine_rules.near_tie(late, late, policy)
    runs = Confident(Measure.agreement, policy.schedule)
    assert not engine_rules.near_tie(trace([4, 7, 6], []), reference, runs)  # runs are whole numbers: no rounding


def test_a_row_exact_rule_that_changes_answers_is_named() -> None:
    rows = [
        {"rule": "own", "batch": 8, "changed": 2, "near_ties": 2},
        {"rule": "compact", "batch": 8, "changed": 2, "near_ties": 1},
        {"rule": "sync", "batch": 8, "changed": 9, "near_ties": 0},
        {"rule": None, "batch": 64, "changed": 0, "near_ties": 0},
    ]
    assert engine_rules.unexplained(rows) == ["compact at 8"]
