"""eval.engine_rules: row-exact rules repeat the batch decoder, and what is counted as a near tie is one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calm.config import BatchRule, Consistency, Measure
from calm.engine_config import EngineRulesConfig
from calm.errors import CalibrationError
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
    assert together["near_ties"] is None
    assert together["skipped"] < reference["skipped"] and together["changed"] > 0
    table = (tmp_path / "engine_rules.md").read_text().splitlines()
    assert len(table) == 2 + len(summary["rules"]) and table[-1].startswith("| engine | sync | 4 |")


def test_a_model_without_that_calibration_is_one_error(certified: Path, tmp_path: Path) -> None:
    config = replace(rules_config(certified / "model", [BatchRule.own]), consistency=Consistency.textual)
    with pytest.raises(CalibrationError, match="no calibration state-textual; it has .*state-risk.*; run python -m"):
        engine_rules.run(config, tmp_path)


def test_a_row_exact_rule_that_changes_answers_is_named() -> None:
    rows = [
        {"rule": "own", "batch": 8, "changed": 2, "near_ties": 2},
        {"rule": "compact", "batch": 8, "changed": 2, "near_ties": 1},
        {"rule": "sync", "batch": 8, "changed": 9, "near_ties": 0},
        {"rule": None, "batch": 64, "changed": 0, "near_ties": 0},
    ]
    assert engine_rules.unexplained(rows) == ["compact at 8"]
