"""Models compared where their quality is equal: the curves by hand, the program on a small model and itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calm.config import Measure
from calm.errors import ConfigError
from calm.experiment_config import UniformityRunConfig
from calm.report_plots import draw_panels, panels_of
from eval import uniformity
from eval.said.uniformity import said
from eval.uniformity_curves import Curve, at_equal_quality

QUICK: dict[str, Any] = {
    "n": 24, "timed": 8, "measures": [Measure.state], "points": 3, "batches": [2, 4], "repeats": 1, "warmups": 0,
    "attempts": 1, "allow_noisy": True, "bootstrap": 20, "close": 0.5,
}  # fmt: skip


def line(depths: list[float], scores: list[float], articles: int = 40, noise: float = 0.0) -> Curve:
    """Articles of two tokens each."""
    draw = np.random.default_rng(0).normal(0.0, noise, articles)
    return Curve(
        np.stack([score + draw for score in scores]),
        np.stack([np.full(articles, 2.0 * depth) for depth in depths]),
        np.full((len(depths), articles), 2.0),
    )


def test_depth_at_a_quality_lies_between_the_points() -> None:
    curve = line([8.0, 4.0, 2.0], [0.40, 0.39, 0.37])
    assert curve.depth_at(0.39) == pytest.approx(4.0) and curve.depth_at(0.38) == pytest.approx(3.0)
    assert np.isnan(curve.depth_at(0.41)) and np.isnan(curve.depth_at(0.30))  # nowhere on the grid
    rows = [{"scores": [0.3], "layers": [4.0], "tokens": [2.0]}, {"scores": [0.4], "layers": [16.0], "tokens": [2.0]}]
    assert Curve.of(rows).depths(slice(None)).tolist() == [8.0, 2.0]  # deepest first


def test_the_difference_is_paired_so_what_articles_share_does_not_widen_it() -> None:
    plain = line([8.0, 6.0, 2.0], [0.40, 0.395, 0.30], noise=0.2)
    other = line([8.0, 4.0, 1.0], [0.40, 0.395, 0.30], noise=0.2)
    found = at_equal_quality(plain, other, 0.005, seed=0, resamples=200)
    assert found["fewer"] == pytest.approx(2.0) and found["layers"] == pytest.approx(4.0)
    assert found["fewer_low"] == pytest.approx(2.0) and found["fewer_high"] == pytest.approx(2.0)


def test_a_quality_that_is_not_on_the_grid_has_no_layers() -> None:
    plain, worse = line([8.0, 2.0], [0.40, 0.30]), line([8.0, 2.0], [0.38, 0.30])
    found = at_equal_quality(plain, worse, 0.01, seed=0, resamples=20)
    assert found["layers"] is None and found["fewer"] is None and found["reached"] == 0.0
    assert found["plain_layers"] == pytest.approx(7.4)


def test_the_program_on_a_model_and_its_twin(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Path(shutil.copytree(certified / "model", tmp_path / "twin"))
    config = UniformityRunConfig(str(certified / "model"), [str(twin)], **QUICK)
    assert uniformity.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    plain = certified.name  # the folder above one that is called model
    rows = pd.DataFrame(summary["rows"]).set_index(["model", "measure", "rule", "batch", "threshold"])
    for name in ("rouge_l", "layers", "crossing"):  # a twin says the same under every rule
        pd.testing.assert_series_equal(rows.loc[plain][name], rows.loc["twin"][name])
    exits = rows.loc[plain].loc["state"]
    assert (exits.loc["sync"]["layers"] >= exits.loc["sync"]["crossing"]).all()
    assert (exits.loc["own"]["layers"] == exits.loc["own"]["crossing"]).all()
    assert {(row["rule"], row["batch"]) for row in summary["equal"]} == {("own", None), ("sync", 2), ("sync", 4)}
    assert all(row["fewer"] in (None, 0.0) for row in summary["equal"])
    clocks = pd.DataFrame(summary["clocks"])
    assert list(clocks[clocks["batch"] == 2]["way"]) == ["full", f"{plain} state", "twin state"]
    assert (clocks[clocks["way"] == "full"]["decode_tokens_ratio"] == 1.0).all()
    assert summary["figures"] == ["uniformity.png", "uniformity.pdf"]
    assert len(said(summary)) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/*/*.json")}
    assert uniformity.run(config, tmp_path) == 0  # nothing is done twice
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/*/*.json")} == before
    capsys.readouterr()


def test_what_cannot_be_asked_is_one_line(certified: Path, tmp_path: Path) -> None:
    folder = str(certified / "model")
    with pytest.raises(ConfigError, match="names no model to compare with"):
        uniformity.run(UniformityRunConfig(folder, **QUICK), tmp_path)
    with pytest.raises(ConfigError, match="two models have one name"):
        uniformity.run(UniformityRunConfig(folder, [folder], **QUICK), tmp_path)
    with pytest.raises(ConfigError, match="has no calibration of entropy"):
        other = shutil.copytree(folder, tmp_path / "other")
        asked = UniformityRunConfig(folder, [str(other)], **{**QUICK, "measures": [Measure.entropy]})
        uniformity.run(asked, tmp_path)
    for wrong in ({"points": 1}, {"close": -1.0}, {"batches": [0]}, {"timed": 1}):
        with pytest.raises(ConfigError):
            UniformityRunConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fewer", "low", "high", "words"),
    [
        (0.5, 0.2, 0.8, "fewer, 3.50"),
        (-0.5, -0.8, -0.2, "more, 3.50"),
        (0.1, -0.2, 0.4, "cannot be told apart, 3.50"),
        (0.1, None, None, "cannot be told apart, 3.50"),
    ],
)
def test_what_is_said_follows_the_interval(fewer: float, low: float | None, high: float | None, words: str) -> None:
    row = {
        "model": "uniform", "measure": "state", "rule": "sync", "batch": 32, "layers": 3.5, "plain_layers": 3.5 + fewer,
        "fewer": fewer, "fewer_low": low, "fewer_high": high,
    }  # fmt: skip
    sentence, trainings = said({"equal": [row, {**row, "batch": 8}], "close": 0.01})
    assert "one training" in trainings
    none = {**row, "layers": None}
    assert "no threshold of it ends there" in said({"equal": [none], "close": 0.01})[0]
    assert f"state under sync at batch 32 {words}" in sentence and "batch 8" not in sentence


def test_the_figure_has_every_model_and_full_depth() -> None:
    def row(model: str, measure: str, rule: str, batch: int, layers: float) -> dict[str, Any]:
        values = {"rouge_l": 0.4, "rouge_l_low": 0.39, "rouge_l_high": 0.41, "layers": layers}
        return {"model": model, "measure": measure, "rule": rule, "batch": batch, **values}

    models = ("plain", "uniform")
    rows = [row(model, "full", "own", 32, 8.0) for model in models]
    rows += [row(m, "state", rule, b, 3.0) for m in models for rule, b in (("own", 32), ("sync", 8), ("sync", 32))]
    clock = {
        "decode_tokens_ratio": 1.5,
        "decode_tokens_ratio_low": 1.4,
        "decode_tokens_ratio_high": 1.6,
        "measure": "state",
    }
    clocks = [{"way": "full"}, *({"way": m, "model": m, "batch": 8, **clock} for m in models)]
    axes = draw_panels(panels_of("uniformity", {"rows": rows, "clocks": clocks, "close": 0.01, "num_layers": 8}))
    assert len(axes) == 2 and "batch 32" in axes[0].get_title()
    names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert names == ["plain, sync", "uniform, sync", "plain, own", "uniform, own"]
    assert any("full depth" in text.get_text() for text in axes[0].texts)
