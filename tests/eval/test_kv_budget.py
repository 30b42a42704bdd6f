"""Exits on a budget: errors by the reference decoder's own keys and values, the program, sentences and figure."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from calm.calibration import load_artifacts
from calm.config import Measure
from calm.data.text import encode_source
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.experiment_config import KvBudgetConfig
from calm.kv_budget import ErrorTable
from calm.models.t5_adapter import T5Adapter
from calm.policies import Budgeted, Full
from calm.report_plots import draw_panels, panels_of
from eval import kv_budget
from eval.kv_budget import plain_ways
from eval.kv_budget_rows import BUDGET, EVERY, Compared, Way, exits_in, fit_row, table_from, table_rows
from eval.said.kv_budget import said

from ..calm.comparing import confident
from ..scripted import early_exit, examples, random_t5

LAYERS, V = 4, 97
CONFIG = KvBudgetConfig(bootstrap=20, batch_size=4, least=2, bins=2)
PLAIN = Way("project", "project", confident(Measure.softmax, 0.15))
MODEL = early_exit(random_t5(seed=1))


@torch.inference_mode()
def test_errors_and_cosines_are_those_of_the_reference_decoder() -> None:
    """By hand with its adapter, one token after the other: what was written, what full depth writes, and the cosine."""
    rows = examples(V, 5, seed=6)
    traces = OneDecoder(MODEL)(rows, PLAIN.policy)
    found, by_hand = exits_in(MODEL, rows, traces, 3), list[tuple[int, int, float, float]]()
    adapter = T5Adapter(MODEL)
    for number, (row, trace) in enumerate(zip(rows, traces, strict=True)):
        source = encode_source(MODEL.tokenizer, row.source, MODEL.settings)
        true, own, said_before = adapter.prefill(source), adapter.prefill(source), adapter.start_token_id
        for step, (token, left) in enumerate(zip(trace.tokens, trace.emission_layers, strict=True)):
            hidden, before = adapter.embed(said_before, step), adapter.embed(said_before, step)
            for layer in range(1, LAYERS + 1):
                hidden = adapter.layer(layer, hidden, true, step)
            after = before
            for layer in range(1, left + 1):
                before, after = after, adapter.layer(layer, after, own, step)
            errors = []
            for layer in range(left + 1, LAYERS + 1):
                pair = adapter.kv(layer, after)
                adapter.write_kv(layer, own, step, *pair)
                right = adapter.read_kv(layer, true, step)
                errors += [float((a - b).norm() / b.norm()) for a, b in zip(pair, right, strict=True)]
            if left < LAYERS:
                cosine = float(torch.cosine_similarity(after[0], before[0], dim=-1))
                by_hand.append((number, LAYERS - left, cosine, sum(errors) / (2 * LAYERS)))
            said_before = token
    columns = [np.array(each) for each in zip(*by_hand, strict=True)]
    assert len(set(columns[1].tolist())) >= 2
    for mine_column, right_column in zip(
        (found.article, found.skipped, found.cosine, found.error), columns, strict=True
    ):
        np.testing.assert_allclose(mine_column, right_column, rtol=1e-3, atol=1e-4)


def test_the_table_foretells_what_it_was_made_from() -> None:
    rows = examples(V, 24, seed=6)
    made = table_rows(CONFIG, MODEL, rows, PLAIN)
    table = table_from(made)
    assert len(made) == LAYERS - 1 and sum(row["exits"] for row in made) > 20
    row = fit_row(CONFIG, MODEL, rows, PLAIN, table)
    assert row["expected"] == pytest.approx(row["error"], rel=0.05) and row["correlation"] >= row["by_skipped"] - 0.05


def test_each_budget_stands_beside_the_nearest_in_layers() -> None:
    rows = [replace(row, target=f"w3 {row.source}") for row in examples(V, 12, seed=7)]
    compared = Compared(CONFIG, MODEL, rows, Way("full", "full", Full()), PLAIN)
    flat = ErrorTable.flat(LAYERS)
    assert not isinstance(PLAIN.policy, Full)
    ways = [PLAIN] + [
        Way(f"{role} {each}", role, Budgeted(PLAIN.policy, float(each), flat), float(each))  # type: ignore[arg-type]
        for role, counts in ((BUDGET, [2]), (EVERY, [1, 2, 8]))
        for each in counts
    ]
    (pair,) = compared.pairs(ways)  # there are no thresholds to stand beside
    assert (pair["way"], pair["other"]) == ("budget 2", "every 2")
    assert pair["to_full_gained"] == 0.0 and pair["layers"] == pair["other_layers"]
    plain, every = compared.row(PLAIN), compared.row(ways[2])
    assert plain["rouge_l_minus_project"] == 0.0 and plain["layers"] < every["layers"] and every["deep"] > plain["deep"]
    assert every["rouge_l_minus_project"] == pytest.approx(every["rouge_l"] - plain["rouge_l"])


def test_the_program_on_a_certified_model(certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"n": 30, "calibrated": 30, "tolerance": 0.45, "budgets": [0.0, 9.0], "every": [1]}
    config = replace(CONFIG, checkpoint=str(certified / "model"), measure=Measure.state, **asked)
    assert kv_budget.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = pd.DataFrame(summary["rows"])
    quality = rows[rows["kind"] == "quality"].set_index("way")
    assert list(quality["role"]) == ["full", "project", "budget", "budget", "every", "true"]  # no grid above this one
    artifact = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.state)
    assert summary["threshold"] == artifact.threshold_for(0.45) == quality.loc["project", "value"]
    assert quality.loc["full", "to_full"] == 1.0 and quality.loc["full", "deep"] == 1.0
    layers = quality["layers"]
    assert layers["project"] <= layers["budget 9"] < layers["every 1"] < layers["budget 0"] == layers["full"] == LAYERS
    assert (rows["kind"] == "pair").sum() == 2 and (rows["kind"] == "fit").sum() == 1
    assert summary["figures"] == ["kv_budget.png", "kv_budget.pdf"] and len(said(summary)) == 4
    capsys.readouterr()


def test_higher_thresholds_are_spread_over_the_grid_above_the_certified_one() -> None:
    grid = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    artifact: Any = SimpleNamespace(
        grid=grid, threshold_for=lambda tolerance: 0.5, policy=lambda at: confident(Measure.softmax, at)
    )
    ways = {points: plain_ways(replace(CONFIG, points=points), artifact) for points in (0, 1, 2, 9)}
    assert [way.name for way in ways[2]] == ["full", "project", "true", "threshold 0.9", "threshold 0.6"]
    assert [len(each) for each in ways.values()] == [3, 4, 5, 7] and ways[1][1].value == 0.5
    artifact.grid[1:3] = [0.999962, 0.999958]  # one number to four digits
    assert len({way.name for way in plain_ways(replace(CONFIG, points=9), artifact)}) == 7


def made_up() -> dict[str, Any]:
    def at(way: str, role: str, value: float | None, layers: float, gap: float) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": "quality", "way": way, "role": role, "value": value, "layers": layers}
        for name, middle in (("rouge_l", 0.4), ("to_full", 0.9), ("rouge_l_minus_project", gap)):
            row |= {name: middle, f"{name}_low": middle - 0.01, f"{name}_high": middle + 0.01}
        return row

    pair = {"kind": "pair", "way": "budget 1", "layers": 4.0, "other_layers": 4.1}
    gained = {"to_full_gained": -0.05, "to_full_gained_low": -0.06, "to_full_gained_high": -0.04}
    gained |= {"rouge_l_gained": 0.001, "rouge_l_gained_low": -0.01, "rouge_l_gained_high": 0.02}
    rows = [
        at("full", "full", None, 8.0, 0.0), at("project", "project", 0.5, 2.0, 0.0),
        at("budget 1", "budget", 1.0, 4.0, 0.02), at("budget 2", "budget", 2.0, 3.0, 0.005),
        at("every 2", "every", 2.0, 4.1, 0.0), at("threshold 0.9", "threshold", 0.9, 4.2, 0.01),
        {**pair, **gained, "other": "every 2", "role": "every"},
        {**pair, **gained, "other": "threshold 0.9", "role": "threshold"},
        {"kind": "fit", "expected": 0.4, "error": 0.41, "correlation": 0.9, "by_skipped": 0.8},
        {"kind": "table", "skipped": 1, "edges": [], "errors": [0.1]},
        {"kind": "table", "skipped": 2, "edges": [0.5], "errors": [0.3, 0.2]},
    ]  # fmt: skip
    return {"rows": rows, "num_layers": 8}


def test_sentences_say_who_gains_and_what_else_the_layers_buy() -> None:
    first, second, gains, third, others, last = said(made_up())
    assert gains == others == "In ROUGE-L to the references, beside the same, none can be told apart."
    assert "budget of 1 with 4.00 layers gains (0.0200 [0.0100, 0.0300]) and 2 with 3.00 layers cannot be told" in first
    assert "budget 1 loses (-0.0500 [-0.0600, -0.0400] at 4.00 layers against 4.10 of every 2)" in second
    assert "a higher threshold" in third and "0.90, and 0.80 by layers skipped alone" in last


def test_the_figure_has_full_depth_every_way_and_the_table() -> None:
    axes = draw_panels(panels_of("kv_budget", made_up()))
    assert len(axes) == 3 and all(ax.get_xlabel() and ax.get_ylabel() for ax in axes)
    assert {text.get_text() for text in axes[0].get_legend().get_texts()} == {
        "no budget", "budget of expected error", "full depth after k exits", "higher thresholds",
    }  # fmt: skip
    assert [text.get_text() for text in axes[2].get_legend().get_texts()] == [
        "cosines, part 1 of 2", "cosines, part 2 of 2",
    ]  # fmt: skip


def test_wrong_settings_are_refused_by_name() -> None:
    for wrong in ({"n": 1}, {"budgets": []}, {"budgets": [-1.0]}, {"every": [0]}, {"bins": 0}, {"tolerance": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            KvBudgetConfig(**wrong)  # type: ignore[arg-type]
