"""Exits beside fixed depths and shallow models: what is paired, what is marked, and what is said of it."""

import json
from dataclasses import replace
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
from calm.errors import CalmError, ConfigError
from calm.experiment_config import ShallowConfig
from calm.metrics import rouge_l
from calm.models.cut import keep_first_layers
from calm.policies import Static
from calm.report_plots import draw_panels, panels_of
from eval import shallow, timed_folder
from eval.common import articles_of
from eval.experiment import UNFINISHED
from eval.said.shallow import said, verdict_of
from eval.shallow_ways import artifact_of, opened, thresholds

QUICK: dict[str, Any] = {
    "n": 24, "timed": 8, "tolerance": 0.45, "measures": [Measure.state], "points": 2, "batches": [2], "batch_size": 8,
    "repeats": 2, "warmups": 0, "attempts": 1, "allow_noisy": True, "bootstrap": 20, "dtype": "fp32",
}  # fmt: skip


def test_the_program_on_a_certified_model_and_its_first_layers(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm.save(keep_first_layers(calm.load(certified / "model"), 2), tmp_path / "two")
    config = ShallowConfig(str(certified / "model"), [str(tmp_path / "two"), str(certified / "model")], **QUICK)
    assert shallow.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = {row["way"]: row for row in summary["rows"]}
    chosen = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.state).threshold_for(0.45)
    exits = [row for row in rows.values() if row["role"] == "exit"]
    assert [name for name in rows if name not in {row["way"] for row in exits}] == [
        "full", "static 1", "static 2", "static 3", "trained 2", "trained 4"
    ]  # fmt: skip
    assert [(row["threshold"], row["tolerance"]) for row in exits if row["marked"]] == [(chosen, 0.45)]
    assert all(row["tolerance"] is None for row in exits if not row["marked"])
    model = calm.load(certified / "model")
    _, articles = articles_of(None, model, 24)
    by_hand = [
        rouge_l(trace.text, article.target)
        for trace, article in zip(OneDecoder(model)(articles, Static(2)), articles, strict=True)
    ]
    for name in ("static 2", "trained 2"):  # cut, not trained: the same answers
        assert rows[name]["rouge_l"] == pytest.approx(np.mean(by_hand)) and rows[name]["layers"] == 2.0
        assert rows[name]["rouge_l_minus_full"] == pytest.approx(np.mean(by_hand) - rows["full"]["rouge_l"])
    assert rows["full"]["decode_tokens_ratio"] == rows["full"]["tokens_ratio"] == 1.0
    assert rows["trained 4"]["rouge_l_minus_full"] == 0.0
    samples = pd.read_parquet(tmp_path / "samples.parquet").set_index("way")
    exit_name = summary["pairs"][0]["exit"]
    mine, other = (np.array(samples["decode_tokens_per_s"][name]) for name in (exit_name, "static 1"))
    assert summary["pairs"][0]["decode_tokens_ratio"] == pytest.approx(np.median(mine / other))
    scores = pd.read_parquet(tmp_path / "rows.parquet").set_index("way")["scores"]
    gained = np.array(scores[exit_name]) - np.array(scores["static 1"])
    assert summary["pairs"][0]["rouge_l_gained"] == pytest.approx(gained.mean())
    assert summary["figures"] == ["shallow.png", "shallow.pdf"]
    (record,) = tmp_path.glob("trials/*/quality_static_2.json")
    write_json(record, {"state": "running"})
    assert shallow.run(config, tmp_path) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_a_busy_machine_leaves_quality_and_no_figure(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(*_: Any) -> None:
        raise CalmError("this machine is too busy to time anything")

    monkeypatch.setattr(timed_folder, "in_turns", busy)
    assert shallow.run(ShallowConfig(str(certified / "model"), **QUICK), tmp_path) == UNFINISHED
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == {"clock-2": "this machine is too busy to time anything"}
    assert summary["rows"] == summary["pairs"] == summary["figures"] == said(summary) == []
    ways = list(pd.read_parquet(tmp_path / "rows.parquet")["way"])
    assert ways[:4] == ["full", "static 1", "static 2", "static 3"] and all("state" in way for way in ways[4:])
    capsys.readouterr()


def test_thresholds_are_spread_over_the_grid_below_one_with_the_chosen_one(certified: Path) -> None:
    artifact = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.softmax)
    below = [place for place, each in enumerate(artifact.grid) if isinstance(each, float) and each < 1.0]
    found = thresholds(artifact, artifact.grid[below[1]], 2)
    assert list(found) == sorted({below[0], below[1], below[-1]}) and found[below[1]] == artifact.grid[below[1]]
    assert thresholds(artifact, 1.0, 0) == {} and list(thresholds(artifact, None, len(below))) == below
    layered = replace(artifact, grid=(1.0, (1.0, 0.9), (0.8, 0.7)))
    assert thresholds(layered, (0.8, 0.7), 1) == {1: (1.0, 0.9), 2: (0.8, 0.7)}


def test_the_full_heads_fp32_calibration_stands_in_where_none_fits(certified: Path) -> None:
    model = opened(certified / "model", "bf16")
    found = artifact_of(model, Measure.state, "bf16")
    assert found is not None and found[0].identity.dtype == "float32" and not found[1]
    exact = artifact_of(opened(certified / "model", "fp32"), Measure.state, "fp32")
    assert exact is not None and exact[1]
    assert artifact_of(model, Measure.entropy, "bf16") is None


def test_a_shallow_model_is_no_deeper_and_of_its_own_depth(certified: Path, tmp_path: Path) -> None:
    folder = str(certified / "model")
    with pytest.raises(ConfigError, match="a model of 4 decoder layers beside one of 4; give each depth once"):
        shallow.run(ShallowConfig(folder, [folder, folder], **QUICK), tmp_path)
    for wrong in ({"n": 1}, {"timed": 1}, {"dtype": "fp8"}, {"batches": []}, {"tolerance": 0.0}):
        with pytest.raises(ConfigError):
            ShallowConfig(**wrong)  # type: ignore[arg-type]


def pair(gained: float, ratio: float, role: str = "static", width: float = 0.002, batch: int = 8) -> dict[str, Any]:
    ends = {"": 0, "_low": -1, "_high": 1}
    spans = {f"rouge_l_gained{end}": gained + at * width for end, at in ends.items()}
    spans |= {f"decode_tokens_ratio{end}": ratio + at * 0.01 for end, at in ends.items()}
    return {
        "exit": "softmax 7", "measure": "softmax", "threshold": 0.5, "tolerance": 0.05, "fixed": f"{role} 4",
        "role": role, "depth": 4, "batch": batch, **spans,
    }  # fmt: skip


def summary_of(*pairs: dict[str, Any]) -> dict[str, Any]:
    """With rows of every way in them, and full depth."""
    ends = {"": 0, "_low": -1, "_high": 1}
    values = {f"decode_tokens_ratio{end}": 1.4 + at * 0.02 for end, at in ends.items()}
    values |= {f"rouge_l{end}": 0.4 + at * 0.01 for end, at in ends.items()}
    values |= {f"rouge_l_minus_full{end}": -0.01 + at * 0.002 for end, at in ends.items()}
    roles = [("full", "full", 8, None), *((p["fixed"], p["role"], 4, None) for p in pairs)]
    rows = [
        {"way": w, "role": r, "depth": d, "measure": m, "threshold": None, "marked": r == "exit", "batch": 8, **values}
        for w, r, d, m in (*roles, ("softmax 7", "exit", None, "softmax"))
    ]
    return {"rows": rows, "pairs": list(pairs), "tolerance": 0.05, "num_layers": 8}


@pytest.mark.parametrize(
    ("gained", "ratio", "verdict"),
    [
        (0.01, 1.2, 1), (0.01, 1.0, 1), (0.0, 1.2, 1), (-0.01, 0.8, -1), (-0.01, 1.0, -1), (0.0, 0.8, -1),
        (0.01, 0.8, 0), (-0.01, 1.2, 0), (0.0, 1.0, 0),
    ],
)  # fmt: skip
def test_who_is_ahead_is_told_by_both_intervals(gained: float, ratio: float, verdict: int) -> None:
    assert verdict_of(pair(gained, ratio)) == verdict
    words = {
        1: "it beats static depth 4",
        -1: "it is beaten by static depth 4",
        0: "beside every fixed depth one is faster",
    }
    (text,) = said(summary_of(pair(gained, ratio)))
    assert words[verdict] in text and not any(words[other] in text for other in words if other != verdict)


def test_sentences_name_the_fastest_rival_and_that_a_training_is_one() -> None:
    text, trainings = said(summary_of(pair(-0.01, 0.8), pair(-0.01, 0.5, "trained")))
    assert text.startswith(
        "softmax at 0.5, certified for risk 0.05, decodes at batch 8 1.40 [1.38, 1.42] times full depth's tokens a "
    )
    assert "the fastest is the model trained with 4: 2.00 [1.96, 2.04] times as fast, 1.0 [0.8, 1.2] points" in text
    assert "static depth 4 and the model trained with 4" in text and "there is one" in trainings


def test_the_figure_has_both_baselines_and_every_depth() -> None:
    (ax,) = draw_panels(panels_of("shallow", summary_of(pair(0.0, 1.0), pair(0.0, 1.0, "trained"))))
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert set(names) == {"exits by softmax", "static depth", "trained with so many layers", "softmax, risk 0.05"}
    assert [text.get_text() for text in ax.texts].count("full depth") == 2
    assert "95 % interval" in ax.get_ylabel() and "over full depth's" in ax.get_xlabel()
