"""What notebooks are made of: the records' folder, pictures, shaded answers, and the two figures drawn only there."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from calm import notebook
from calm.errors import DataError
from calm.metrics import median_interval
from calm.notebook import Picture, results, shaded_answer, shaded_layers
from calm.report_plots import draw_panels
from calm.report_plots.certificate import LEAST, certificate_panels
from calm.report_plots.speed import FIXED, ratios, speed_panels

ROOT = Path(__file__).parents[2]


def test_records_are_found_from_the_root_from_inside_and_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in (ROOT, ROOT / "tests" / "calm", tmp_path):
        assert results(start) == ROOT / "results"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "README.md").write_text("")
    monkeypatch.chdir(tmp_path)
    assert results() == tmp_path / "results"
    monkeypatch.setattr(notebook, "CONF_DIR", tmp_path / "nowhere" / "conf")
    with pytest.raises(DataError, match="start in a checkout"):
        results(Path("/"))


def test_a_figure_is_a_picture_of_one_or_several_axes() -> None:
    shown = certificate_panels(risk_table(), {"tolerance": 0.05, "test_level": 0.0167})
    axes = draw_panels(shown)
    for each in (axes, axes[0]):
        assert Picture(each)._repr_png_().startswith(b"\x89PNG")


def test_tokens_are_shaded_by_layer_and_nothing_in_them_is_html() -> None:
    shown = shaded_answer(["▁a<b", "c"], [1, 4], 4, "x & y") + shaded_answer(["d"], [1], 1)
    html = shown._repr_html_()
    assert "&nbsp;a&lt;b" in html and "x &amp; y" in html and "<b<" not in html
    assert 'title="layer 1 of 4" style="background:rgb(255,255,255)' in html
    assert 'title="layer 4 of 4" style="background:rgb(111,191,236)' in html
    with pytest.raises(ValueError):
        shaded_answer(["a"], [1, 2], 4)


def test_layers_are_rows_from_the_last_down_and_what_was_not_asked_is_empty() -> None:
    html = shaded_layers(["▁a", "▁"], [[0.25, math.nan], [0.95, 1.0]], "softmax", lowest=0.9)._repr_html_()
    rows = html.split("<tr>")[1:]
    assert "<th>a</th><th>␣</th>" in rows[0] and rows[1].startswith("<th>2</th><td></td>") and "0.25" in rows[2]
    assert 'background:rgb(255,255,255);color:#000">0.25' in html  # below what is white
    assert "1.00" in rows[1] and shaded_layers([], [])._repr_html_()


def risk_table() -> pd.DataFrame:
    rows = [
        {"measure": name, "layers_skipped": 0.1 * i, "mean_loss": 0.015 * i, "p_value": p, "certified": p < 0.01}
        for name in ("softmax", "state")
        for i, p in enumerate((0.0, 1e-5, 0.4))
    ]
    return pd.DataFrame(rows)


def test_the_certificate_figure_marks_what_passed_and_the_levels() -> None:
    risk, tests = certificate_panels(risk_table(), {"tolerance": 0.05, "test_level": 0.01})
    marks = [series for series in risk.series if series.kind == "points"]
    assert [(list(mark.x), list(mark.y)) for mark in marks] == [([10.0], [0.015])] * 2
    assert risk.levels[0].at == 0.05 and tests.levels[0].at == -2.0
    assert list(tests.series[0].y) == pytest.approx([LEAST, -5.0, math.log10(0.4)])


def samples(batch: int = 8) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for round_, noise in enumerate((1.0, 2.0, 4.0)):  # of the machine: it hits all that is timed in a repeat
        for name, seconds in (("full", 6.0), ("exit", 3.0), ("static-4", 2.0)):
            common = {"batch": batch, "name": name, "round": round_}
            rows.append({**common, "kind": "clock", "few_s": noise, "many_s": noise * (1 + seconds)})
            rows.append({**common, "kind": "session", "seconds": noise * 2 * seconds, "tokens": 2 if noise < 4 else 4})
    return pd.DataFrame(rows)


def test_ratios_are_paired_within_a_repeat() -> None:
    for clock in ("decode", "session"):
        found = ratios(samples(), clock).set_index("name")
        assert found.loc["exit", ["ratio", "ratio_low", "ratio_high"]].tolist() == pytest.approx([2.0] * 3)
        assert found.loc["full", "ratio"] == 1.0
    beside = ratios(samples(), "decode", against="static-4").set_index("name")
    assert beside.loc["exit", "ratio"] == pytest.approx(2 / 3)


def test_the_interval_of_a_median_holds_its_probability() -> None:
    for n in range(6, 40):
        low, high = median_interval(list(range(n)))
        assert high == n - 1 - low
        outside = [2 * binom.cdf(low + more, n, 0.5) for more in (0, 1)]
        assert outside[0] <= 0.05 < outside[1]
    draw = np.random.default_rng(0).exponential(size=(2_000, 9))
    ends = np.array([median_interval(list(row)) for row in draw])
    assert ((ends[:, 0] <= math.log(2)) & (math.log(2) <= ends[:, 1])).mean() > 0.95
    assert median_interval([3.0, 1.0]) == (1.0, 3.0)


def test_the_speed_figure_has_static_depths_and_full_depth_beside() -> None:
    quality = {"rouge_l": 0.4, "rouge_l_low": 0.39, "rouge_l_high": 0.41}
    speed = {"ratio": 1.5, "ratio_low": 1.4, "ratio_high": 1.6}
    rows = [
        {"batch": batch, "name": name, "depth": depth, **quality, **speed}
        for batch in (1, 8)
        for name, depth in (("static-4", 4.0), ("static-3", 3.0), ("softmax", None), ("state", None))
    ]
    about = {"clock": "decode step", "full": 0.41, "full_low": 0.4, "full_high": 0.42}
    first, second = speed_panels(pd.DataFrame(rows), about)
    assert (first.title, second.title) == ("decode step, batch 1", "decode step, batch 8")
    assert [series.name for series in first.series] == [FIXED, "softmax", "state"]
    assert first.series[0].text == ["3", "4"] and first.series[1].text is None
    assert [(level.at, level.upright) for level in first.levels] == [(0.41, False), (1.0, True)]
    assert len(draw_panels([first, second])) == 2
    exits = speed_panels(pd.DataFrame(rows)[lambda df: df["depth"].isna()], about)[0]
    assert [series.name for series in exits.series] == ["softmax", "state"]
