"""Grouping requests by difficulty: orders, prices and predictions against what they mean, written out plainly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calm.config import BatchRule, Measure, RunnerName
from calm.cost import CostTable, backfilling, checking
from calm.errors import CalmError, ConfigError, DataError
from calm.experiment_config import GroupingConfig
from calm.report_plots import draw_panels, panels_of
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine
from eval import grouping
from eval.grouping_orders import Steps, one_after_another, regrouped, windows
from eval.grouping_predictor import between, binned, cross_fitted, worth
from eval.grouping_price import Prices
from eval.recorded import padded, policy_of
from eval.said.grouping import said

LAYERS = 5


def drawn(seed: int, count: int = 23) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [list(map(int, generator.integers(1, LAYERS + 1, generator.integers(1, 8)))) for _ in range(count)]


def test_windows_sort_what_came_together_up_and_down_in_turn() -> None:
    keys = np.array([3.0, 1.0, 2.0, 9.0, 7.0, 8.0, 5.0])
    assert windows(keys, 3).tolist() == [1, 2, 0, 3, 5, 4, 6]
    assert windows(keys, 100).tolist() == np.argsort(keys).tolist()
    assert windows(np.zeros(4), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [1, 3, 8, 40])
def test_free_places_are_taken_in_order(batch: int) -> None:
    answers = drawn(batch)
    waiting, running, steps, first = list(range(len(answers))), list[list[int]](), list[list[int]](), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < batch:
            first[waiting[0]] = len(steps)
            running.append([waiting.pop(0), 0])
        steps.append([answers[row][at] for row, at in running])
        running = [[row, at + 1] for row, at in running if at + 1 < len(answers[row])]
    found = one_after_another(padded(answers), batch, LAYERS)
    assert found.counts.tolist() == [[depths.count(layer) for layer in range(1, LAYERS + 1)] for depths in steps]
    assert found.first.tolist() == [first[row] for row in range(len(answers))]
    assert found.stops(1.0).tolist() == [max(depths) for depths in steps]
    half = [min(layer for layer in depths if sum(d <= layer for d in depths) >= len(depths) / 2) for depths in steps]
    assert found.stops(0.5).tolist() == half


@pytest.mark.parametrize("recent", [None, 1, 2])
def test_rounds_regroup_what_runs(recent: int | None) -> None:
    answers, batch, pool = drawn(7), 3, 2
    waiting, running, steps, told = list(range(len(answers))), list[tuple[int, int]](), list[list[int]](), list[int]()
    while waiting or running:
        while waiting and len(running) < batch * pool:
            running.append((waiting.pop(0), 0))

        def key(place: tuple[int, int]) -> float:
            row, at = place
            if recent is None:
                return answers[row][at]
            last = answers[row][max(0, at - recent) : at]  # noqa: B023
            return sum(last) / len(last) if last else sum(told) / max(1, len(told))  # noqa: B023

        order = sorted(running, key=key)
        steps += [[answers[row][at] for row, at in order[i : i + batch]] for i in range(0, len(order), batch)]
        told += [answers[row][at] for row, at in running]
        running = [(row, at + 1) for row, at in running if at + 1 < len(answers[row])]
    found = regrouped(padded(answers), batch, pool, LAYERS, recent)
    assert found.counts.tolist() == [[depths.count(layer) for layer in range(1, LAYERS + 1)] for depths in steps]
    assert found.rows.sum() == sum(map(len, answers))


def test_a_row_that_is_alone_meets_nobody() -> None:
    answers = drawn(2)
    for found in (one_after_another(padded(answers), 1, LAYERS), regrouped(padded(answers), 1, 4, LAYERS, 2)):
        assert sorted(found.stops(1.0).tolist()) == sorted(layer for answer in answers for layer in answer)


def some_table(rows: int) -> CostTable:
    """Every entry has a price of its own."""
    generator = np.random.default_rng(5)
    names = ["start", "layer", "layer_gathered", "head", "early_head", "read", checking(())]
    names += [checking({m}, first) for m in (Measure.softmax, Measure.state) for first in (True, False)]
    names += [backfilling(layers) for layers in range(1, LAYERS)]
    sized = {name: {size: float(generator.random()) for size in range(1, rows + 1)} for name in names}
    single = {name: {1: float(generator.random())} for name in ("step", "row", "admit", "end", "move")}
    return CostTable({**sized, **single, "encode": {16: 3.0, 32: 5.0}})


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("measures", [{Measure.softmax}, {Measure.state}, set()])
@pytest.mark.parametrize("rule", [Rule(BatchRule.own), Rule(BatchRule.sync), Rule(BatchRule.quantile, 0.6)])
def test_a_step_costs_what_the_simulator_says(packed: bool, measures: set[Measure], rule: Rule) -> None:
    rows = 6
    buckets = (1, 2, 4, 6) if packed else tuple(range(1, rows + 1))
    setting = Setting(LAYERS, buckets, frozenset(range(1, LAYERS)), packed=packed)
    prices, asked, generator = Prices(some_table(rows), setting), frozenset(measures), np.random.default_rng(1)
    for _ in range(60):
        depths = generator.integers(1, LAYERS + 1, generator.integers(1, rows + 1)).tolist()
        engine = SimEngine(prices.table, setting, rule)
        engine.place([Trace((depth,), measures=asked) for depth in depths])
        told = engine.step()
        steps = Steps(np.array([[depths.count(layer) for layer in range(1, LAYERS + 1)]]), np.zeros(1, dtype=int))
        stop = steps.stops(rule.share)
        assert stop.tolist() == [len(told.layers)]
        found = prices.steps(steps.counts, stop, asked, holds=rule.name is not BatchRule.sync)
        assert found[0] == pytest.approx(told.total - told.seconds["slots"])


def test_what_requests_cost_beside_the_steps() -> None:
    setting = Setting(LAYERS, (1, 2), frozenset({1}), prefill_rows=2, source_multiple=16)
    prices = Prices(some_table(2), setting)
    each = prices.table.at("admit") + prices.table.at("end")
    assert prices.requests([3, 16, 17]) == pytest.approx((3 + 3 + 5) / 2 + 3 * each)
    with pytest.raises(ConfigError, match="graph runner"):
        Prices(prices.table, Setting(LAYERS, (1,), frozenset({1}), one_piece=True))


def test_the_predictor_finds_what_is_there_and_nothing_else() -> None:
    generator = np.random.default_rng(3)
    features = generator.normal(size=(200, 6))
    true = 2 + features[:, 0] - 0.5 * features[:, 3] + generator.normal(0, 0.1, 200)
    good = worth(cross_fitted(features, true, 5, 0), true, 0, 100)
    assert good["r2"] > 0.95 and good["rank"] > 0.95 and good["r2_low"] <= good["r2"] <= good["r2_high"]
    noise = worth(cross_fitted(generator.normal(size=(200, 6)), true, 5, 0), true, 0, 100)
    assert noise["r2"] < 0.1 and abs(noise["rank"]) < 0.3
    with pytest.raises(CalmError, match="5 folds need 10 articles, got 9"):
        cross_fitted(features[:9], true[:9], 5, 0)


def test_no_article_predicts_itself() -> None:
    generator = np.random.default_rng(4)
    features, true = generator.normal(size=(60, 4)), generator.normal(size=60)
    before = cross_fitted(features, true, 6, 0)
    true[17] += 1000
    after = cross_fitted(features, true, 6, 0)
    assert after[17] == before[17] and (after != before).sum() > 40


def test_variance_between_answers() -> None:
    assert between(padded([[1, 1, 1], [4, 4, 4], [2, 2, 2]])) == 1.0
    assert between(padded([[1, 4], [4, 1], [1, 4]])) == 0.0
    generator = np.random.default_rng(0)
    level = generator.normal(50, 3, 3000)[:, None]
    answers = np.rint(level + generator.normal(0, 4, (3000, 6))).astype(np.int64)
    assert between(answers) == pytest.approx(9 / (9 + 16), abs=0.03)


def test_bins_have_as_many_articles() -> None:
    rows = binned(np.arange(10.0)[::-1], np.arange(10.0), 5, 0, 20)
    assert [row["articles"] for row in rows] == [2] * 5
    assert [row["predicted"] for row in rows] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert [row["true"] for row in rows] == [8.5, 6.5, 4.5, 2.5, 0.5]


def quick(certified: Path, **changes: Any) -> GroupingConfig:
    settings: dict[str, Any] = {
        "checkpoint": str(certified / "model"), "batches": [2, 4], "pools": [2, 4], "draws": 6, "folds": 4, "bins": 3,
        "price_repeats": 1, "timed_batches": [2], "timed": 10, "repeats": 1, "warmups": 0, "allow_noisy": True,
        "bootstrap": 20,
    }  # fmt: skip
    return GroupingConfig(str(certified / "table_run"), **{**settings, **changes})


def test_the_program_goes_on_where_it_was(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval import grouping_timed

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    config = quick(certified)
    with monkeypatch.context() as patch:
        patch.setattr(grouping_timed, "paired", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grouping.run(config, tmp_path)
    kept = {path: path.read_text() for path in tmp_path.rglob("costs-*.json")}
    assert len(kept) == len(config.batches)
    assert grouping.run(config, tmp_path) == 0
    for path, text in kept.items():  # priced by the tables that the first half was priced by
        assert path.read_text() == text
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = pd.DataFrame(summary["rows"])
    assert set(rows["part"]) == {"predictor", "bins", "counted", "timed"} and not summary["failed"]
    own = rows[(rows["part"] == "counted") & (rows["rule"] == "own")].set_index(["row", "batch", "grouping", "pool"])
    assert set(own.index.get_level_values("grouping")) == {
        "random", "encoder", "length", "oracle", "online", "step oracle"
    }  # fmt: skip
    first = rows["row"].iloc[0]
    for batch in (2, 4):
        alone = summary["mean_depth"][first]
        best, random = (own.loc[(first, batch, *way), "step_layers"] for way in (("step oracle", 4), ("random", 1)))
        assert alone - 1e-9 <= best <= random
        assert own.loc[(first, batch, "encoder", 2), "wait_requests"] == (2 * batch - 1) / 2
        assert own.loc[(first, batch, "online", 4), "steps_of_a_token"] == 4
    timed = rows[(rows["part"] == "timed") & (rows["rule"] == "own")]
    assert (timed["as_recorded"] == 1.0).all() and len(timed) == 3
    assert timed["step_layers"].tolist() == pytest.approx(timed["predicted_step_layers"].tolist())
    assert summary["figures"] == ["grouping.png", "grouping.pdf"]
    assert said(summary) and all(sentence.endswith(".") for sentence in said(summary))
    capsys.readouterr()


def test_what_cannot_be_asked_is_one_line(certified: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nobody' is none of"):
        grouping.run(quick(certified, rows=["nobody"]), tmp_path)
    with pytest.raises(DataError, match="row 'full' of the records has no measure"):
        grouping.run(quick(certified, rows=["full"]), tmp_path)
    with pytest.raises(DataError, match="'oracle' of the records has no measure"):
        policy_of({"row": "oracle", "measure": None, "threshold": None}, 8)
    with pytest.raises(ConfigError, match="pools"):
        GroupingConfig(pools=[1])
    with pytest.raises(ConfigError, match="on a CPU"):
        GroupingConfig(runner=RunnerName.graph)
    code = grouping.run(quick(certified, batches=[2, 64], timed_batches=[], draws=2), tmp_path)
    failed = json.loads((tmp_path / "summary.json").read_text())["failed"]
    assert code == grouping.UNFINISHED and "2 batches of 64 need twice as many articles" in next(iter(failed.values()))


def made_up(saved: dict[str, tuple[float, float]], over_random: tuple[float, float, float]) -> dict[str, Any]:
    """Rows of one batch size: what each way saves (its interval), and what was timed."""

    def entry(way: str, low: float, high: float) -> dict[str, Any]:
        middle, pool = (low + high) / 2, 1 if way == "random" else 4
        gain = {"gain": 1 + middle, "gain_low": 1 + low, "gain_high": 1 + high}
        return {
            "part": "counted", "row": "state", "batch": 8, "rule": "own", "grouping": way, "pool": pool,
            "step_layers": 6.0 - middle, "step_layers_low": 5.5 - middle, "step_layers_high": 6.5 - middle,
            "saved": middle, "saved_low": low, "saved_high": high, **gain,
            "over_random": 1 + middle, "over_random_low": 1 + low, "over_random_high": 1 + high,
            "wait_requests": 15.5, "steps_of_a_token": 4.0 if way == "online" else 1.0,
        }  # fmt: skip

    ways = {"random": (0.0, 0.0), **saved, "oracle": (1.0, 2.0), "step oracle": (2.0, 3.0)}
    middle, low, high = over_random
    timed = {
        "part": "timed", "row": "state", "batch": 8, "rule": "own", "grouping": "encoder", "gain": 1.1, "gain_low": 1.0,
        "gain_high": 1.2, "predicted_gain": 1.21, "over_random": middle, "over_random_low": low,
        "over_random_high": high, "predicted_over_random": 1.03, "noisy": False,
    }  # fmt: skip
    told = {
        "part": "predictor", "row": "state", "key": "encoder", "r2": 0.1, "r2_low": 0.05, "r2_high": 0.15,
        "rank": 0.3, "rank_low": 0.2, "rank_high": 0.4, "between": 0.25,
    }  # fmt: skip
    bins = [{"part": "bins", "row": "state", "predicted": x, "true": x, "true_low": x - 1, "true_high": x + 1}
            for x in (3.0, 4.0)]  # fmt: skip
    static = {**entry("random", 0, 0), "rule": "static", "grouping": "static", "gain": 1.5}
    rows = [*(entry(way, *ends) for way, ends in ways.items()), static, timed, told, *bins]
    return {"rows": rows, "num_layers": 8, "mean_depth": {"state": 4.0}}


def test_winners_ties_and_losers_are_called_so() -> None:
    first, bound, timed = said(
        made_up({"encoder": (0.4, 0.6), "length": (-0.1, 0.2), "online": (-0.5, -0.3)}, (1.05, 1.02, 1.08))
    )
    assert "Grouping by the encoder's prediction saves 0.50 [0.40, 0.60] layers" in first
    assert "by source length (0.05 [-0.10, 0.20] layers of a step) cannot be told from random order" in first
    assert "by a row's recent exits costs 0.40 [0.30, 0.50] layers" in first
    assert "1.500 [1.400, 1.600] times random order's tokens/s" in first and "until 15.5 more have come" in first
    assert "R² 0.100 [0.050, 0.150]" in bound and "25% of the variance" in bound
    assert "1.21 predicted, 1.10 timed" in timed and "1.050 (rounds 1.020 to 1.080, predicted 1.030)." in timed

    first, _, timed = said(
        made_up({"encoder": (-0.6, -0.4), "length": (-0.1, 0.2), "online": (0.3, 0.5)}, (1.0, 0.98, 1.03))
    )
    assert "by a row's recent exits saves 0.40 [0.30, 0.50]" in first and "speaks once in 4 steps" in first
    assert "by the encoder's prediction costs 0.50 [0.40, 0.60]" in first and "not told apart" in timed

    first, *_ = said(made_up({"encoder": (-0.1, 0.1), "length": (-0.1, 0.2), "online": (-0.3, 0.5)}, (1.0, 1.0, 1.0)))
    assert "saves" not in first and "costs" not in first and "Predicted for" not in first
    assert said({"rows": [], "num_layers": 8}) == []


def test_the_figure_has_baselines_and_what_was_timed() -> None:
    summary = made_up({"encoder": (0.4, 0.6), "length": (-0.1, 0.2), "online": (0.1, 0.3)}, (1.05, 1.02, 1.08))
    axes = draw_panels(panels_of("grouping", summary))
    assert [ax.get_title() for ax in axes] == [
        "state: own and sync, pool of 4 batches", "state, own: predicted; filled: timed",
        "state: told by the encoder, R² 0.10 [0.05, 0.15]",
    ]  # fmt: skip
    names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert names == ["random", "length", "encoder", "online", "oracle", "step oracle", "a row alone"]
    for ax in axes[:2]:
        assert any(text.get_text() == "full depth" for text in ax.texts)
    assert "layers" in axes[0].get_ylabel() and "tokens/s over full depth" in axes[1].get_ylabel()
    told = {**summary, "rows": [row for row in summary["rows"] if row["part"] in ("predictor", "bins")]}
    assert len(panels_of("grouping", told)) == 1
