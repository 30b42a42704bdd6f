"""Exits beside fixed depths and shallow models: what is paired, what is marked, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import calm
from calm.calibration import load_artifacts
from calm.checkpoint import write_json
from calm.config import Measure
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.experiment_config import ShallowConfig
from calm.metrics import rouge_l
from calm.models.cut import keep_first_layers
from calm.policies import Static
from calm.report_plots import draw_panels, panels_of
from eval import shallow
from eval.common import articles_of
from eval.said.shallow import said
from eval.shallow_ways import thresholds
from eval.way_clock import clock_rows

QUICK: dict[str, Any] = {
    "n": 24, "tolerance": 0.45, "measures": [Measure.state], "points": 2, "batches": [2], "batch_size": 8, "few": 2,
    "many": 8, "repeats": 1, "warmups": 0, "attempts": 1, "allow_noisy": True, "bootstrap": 20,
}  # fmt: skip


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every way's turn takes as long as it has tokens, whoever else uses the machine."""
    monkeypatch.setattr(shallow, "clock_rows", lambda contenders, *_: [ticked(each.name) for each in contenders])


def ticked(name: str) -> dict[str, Any]:
    clock = {
        "full_s": [2.0],
        "own_s": [1.0],
        "decode_tokens_ratio": 2.0,
        "decode_tokens_ratio_low": 2.0,
        "decode_tokens_ratio_high": 2.0,
    }
    return {"way": name, "noisy": False, "again": 1.0, "call_over_full": 1.5, **clock}


def test_the_program_on_a_certified_model_and_its_first_layers(
    certified: Path, tmp_path: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    calm.save(keep_first_layers(calm.load(certified / "model"), 2), tmp_path / "two")
    config = ShallowConfig(str(certified / "model"), [str(tmp_path / "two")], **QUICK)
    assert shallow.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = {row["way"]: row for row in summary["rows"]}
    chosen = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.state).threshold_for(0.45)
    exits = [row for row in rows.values() if row["role"] == "exit"]
    assert [name for name in rows if name not in {row["way"] for row in exits}] == [
        "full", "static-1", "static-2", "static-3", "trained-2"
    ]  # fmt: skip
    assert [row["threshold"] for row in exits if row["marked"]] == [chosen]
    assert all(row["certified"] == row["marked"] for row in exits)
    model = calm.load(certified / "model")
    _, articles = articles_of(None, model, 24)
    by_hand = [
        rouge_l(trace.text, article.target)
        for trace, article in zip(OneDecoder(model)(articles, Static(2)), articles, strict=True)
    ]
    for name in ("static-2", "trained-2"):  # cut, not trained: the same answers
        assert rows[name]["rouge_l"] == pytest.approx(np.mean(by_hand)) and rows[name]["layers"] == 2.0
        assert rows[name]["rouge_l_minus_full"] == pytest.approx(np.mean(by_hand) - rows["full"]["rouge_l"])
    assert len(summary["pairs"]) == 4 and {pair["speed_ratio"] for pair in summary["pairs"]} == {1.0}
    scores = pd.read_parquet(tmp_path / "rows.parquet").set_index("way")["scores"]
    exit_name = summary["pairs"][0]["exit"]
    gained = np.array(scores[exit_name]) - np.array(scores["static-1"])
    assert summary["pairs"][0]["rouge_l_gained"] == pytest.approx(gained.mean())
    assert summary["figures"] == ["shallow.png", "shallow.pdf"]
    (record,) = tmp_path.glob("trials/*/quality-static-2.json")
    write_json(record, {"state": "running"})
    assert shallow.run(config, tmp_path) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_thresholds_are_spread_over_the_grid_below_one_with_the_chosen_one(certified: Path) -> None:
    artifact = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.softmax)
    below = [each for each in artifact.grid if isinstance(each, float) and each < 1.0]
    found = thresholds(artifact, below[1], 2)
    assert found == sorted({below[0], below[1], below[-1]}, reverse=True)
    assert thresholds(artifact, 1.0, 0) == [] and thresholds(artifact, (0.5, 0.6), len(below)) == below


def test_a_shallow_model_must_be_shallower(certified: Path, tmp_path: Path, steady: None) -> None:
    folder = str(certified / "model")
    with pytest.raises(ConfigError, match="a model of 4 decoder layers beside one of 4"):
        shallow.run(ShallowConfig(folder, [folder], **QUICK), tmp_path)
    for wrong in ({"n": 0}, {"few": 8, "many": 8}, {"dtype": "fp8"}, {"batches": []}, {"tolerance": 0.0}):
        with pytest.raises(ConfigError):
            ShallowConfig(**wrong)  # type: ignore[arg-type]


def test_the_clock_is_the_baselines_own_beside_each_way() -> None:
    import time

    from eval.clocks import Contender

    def sleeper(share: float) -> Any:
        return lambda n: time.sleep(share * n / 1000)

    config = ShallowConfig(few=2, many=12, repeats=3, allow_noisy=True, attempts=1)
    full, half = clock_rows([Contender("full", sleeper(2.0)), Contender("half", sleeper(1.0))], config, "here")
    assert full["decode_tokens_ratio"] == 1.0 and half["decode_tokens_ratio"] == pytest.approx(2.0, rel=0.3)
    assert (
        half["decode_tokens_ratio_low"] <= half["decode_tokens_ratio"] <= half["decode_tokens_ratio_high"]
        and len(half["own_s"]) == 3
    )


SPEEDS = {"full": 1.0, "static-4": 1.5, "trained-4": 1.6, "softmax@0.5": 1.3}


def made(speeds: dict[str, float], losses: dict[str, float], width: float = 0.002) -> dict[str, Any]:
    """A summary of batch 8 in which ways have such speeds and such ROUGE-L against full depth."""
    roles = {"full": "full", "static-4": "static", "trained-4": "trained shallow", "softmax@0.5": "exit"}
    rows = [
        {
            "way": name, "role": roles[name], "batch": 8, "decode_tokens_ratio": speed,
            "rouge_l_minus_full": losses[name],
            "depth": None if "@" in name else 4, "measure": "softmax" if "@" in name else None, "marked": "@" in name,
            "rouge_l": 0.4 + losses[name], "rouge_l_low": 0.39, "rouge_l_high": 0.41, "decode_tokens_ratio_low": speed,
            "decode_tokens_ratio_high": speed,
        }
        for name, speed in speeds.items()
    ]  # fmt: skip
    pairs = [
        {
            "exit": "softmax@0.5", "fixed": name, "batch": 8, "speed_ratio": speeds["softmax@0.5"] / speeds[name],
            "rouge_l_gained": gained, "rouge_l_gained_low": gained - width, "rouge_l_gained_high": gained + width,
        }
        for name in ("static-4", "trained-4")
        for gained in (losses["softmax@0.5"] - losses[name],)
    ]  # fmt: skip
    return {"rows": rows, "pairs": pairs, "tolerance": 0.05, "num_layers": 8}


def test_what_is_said_follows_the_winner() -> None:
    losses = {"full": 0.0, "static-4": -0.02, "trained-4": -0.03, "softmax@0.5": -0.005}
    close, worth = said(made(SPEEDS, losses))
    assert "softmax@0.5 runs at 1.30 (-0.0050)" in close and "static" not in close and "batch 8" in close
    assert worth == "No fixed depth is both faster than softmax@0.5 at batch 8 and as good."
    beaten = said(made(SPEEDS, {**losses, "trained-4": 0.0}))
    assert (
        beaten[1]
        == "softmax@0.5 is not worth it at batch 8: trained-4 is 1.23 times as fast and better (+0.0050 ROUGE-L)."
    )
    tied = {**losses, "static-4": -0.0049}
    level = said(made(SPEEDS, tied))
    assert "gains nothing at batch 8 over static-4, which is 1.15 times as fast" in level[1]
    assert "cannot be told apart (+0.0001 [-0.0019, +0.0021])" in level[1]
    none = said(made(SPEEDS, dict.fromkeys(losses, -0.5)))
    assert none[0] == "At batch 8 nothing stays within 0.01 ROUGE-L of full depth."


def test_the_figure_has_both_baselines_and_every_depth() -> None:
    losses = dict.fromkeys(("full", "static-4", "trained-4", "softmax@0.5"), 0.0)
    summary = made(SPEEDS, losses)
    (ax,) = draw_panels(panels_of("shallow", summary))
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert set(names) == {"exits by softmax", "static", "trained shallow", "softmax, risk 0.05"}
    assert [text.get_text() for text in ax.texts].count("full depth") == 2
    assert "95 % interval" in ax.get_ylabel() and "over full depth's" in ax.get_xlabel()
