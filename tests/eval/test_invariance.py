"""Answers in batches beside those of rows alone: the program, against what is counted by hand."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calm import load
from calm.calibration import ModelIdentity, load_artifacts
from calm.config import BatchRule, DecoderName, Measure, RunnerName
from calm.decode_spec import DecodeSpec
from calm.errors import CalibrationError, CalmError, ConfigError
from calm.experiment_config import InvarianceConfig
from calm.metrics import rouge_l
from calm.policies import Full
from calm.report_plots import draw_panels, panels_of
from eval import invariance
from eval.common import articles_of
from eval.invariance import misplaced, share
from eval.invariance_ways import Decoder, ways_of
from eval.said.invariance import said
from serve.decoder import engine_decoder
from serve.native.build import available

from .conftest import TOLERANCE

N = 24
RULES = [BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.sync]


def config_of(folder: Path, **changes: Any) -> InvarianceConfig:
    settings: dict[str, Any] = {
        "n": N, "measure": Measure.state, "tolerance": TOLERANCE, "rules": RULES, "batches": [1, 4],
        "runner": RunnerName.eager, "dtypes": ["fp32"], "eager_dtypes": [], "bootstrap": 50,
    }  # fmt: skip
    return InvarianceConfig(str(folder), **{**settings, **changes})


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def test_tokens_out_of_place_and_shares() -> None:
    assert misplaced([4, 5, 1], [4, 5, 1]) == 0
    assert misplaced([4, 1], [4, 5, 1]) == 2 and misplaced([4, 5, 1, 9], [4, 5, 1]) == 0
    assert misplaced([], [4, 1]) == 2
    none = share("changed", 0, 300)
    assert none["changed"] == none["changed_low"] == 0 and math.isclose(none["changed_high"], 1 - 0.025 ** (1 / 300))
    half = share("changed", 5, 10)
    assert half["changed_low"] < 0.5 < half["changed_high"] and math.isclose(
        half["changed_low"], 1 - half["changed_high"]
    )


def test_the_program_beside_the_answers_counted_by_hand(certified: Path, tmp_path: Path) -> None:
    folder = certified / "model"
    assert invariance.run(config_of(folder), tmp_path) == 0
    summary = summary_of(tmp_path)
    rows = pd.DataFrame(summary["rows"]).set_index(["rule", "batch", "order"])
    assert len(rows) == len(RULES) * 3 and ("own", 1, "shuffled") not in rows.index
    model = load(folder)
    artifact = next(each for each in load_artifacts(folder) if each.measure is Measure.state)
    policy = artifact.policy(artifact.threshold_for(TOLERANCE))
    assert summary["ways"][0]["artifact"] == artifact.name and summary["ways"][0]["certified"]
    articles = articles_of(None, model, N)[1]
    spec = partial(DecodeSpec, str(folder), decoder=DecoderName.engine, make=engine_decoder)
    full = {trace.id: trace for trace in spec(batch_size=1).over(model)(articles, Full())}
    alone = {trace.id: trace for trace in spec(batch_size=1).over(model)(articles, policy)}
    arrival = np.random.default_rng(0).permutation(N)
    together = spec(batch_size=4, rule=BatchRule.sync).over(model)([articles[each] for each in arrival], policy)
    found, target = rows.loc["sync", 4, "shuffled"], {each.id: each.target for each in articles}
    assert found["answers_changed"] == sum(each.tokens != alone[each.id].tokens for each in together) > 0

    def losses(traces: Any) -> list[float]:
        return [
            max(0.0, rouge_l(full[each.id].text, target[each.id]) - rouge_l(each.text, target[each.id]))
            for each in traces
        ]

    assert math.isclose(found["risk"], float(np.mean(losses(together))), abs_tol=1e-12)
    own = float(np.mean(losses(alone.values())))
    assert math.isclose(rows.loc["own", 1, "given"]["risk"], own, abs_tol=1e-12)
    assert math.isclose(found["minus_own"], found["risk"] - own, abs_tol=1e-12)
    gone = sum(misplaced(each.tokens, alone[each.id].tokens) for each in together)
    assert math.isclose(found["tokens_changed"], gone / sum(len(each.tokens) for each in alone.values()))
    assert np.isnan(found["near_ties"]) and not found["certified"]
    exact = rows[rows["row_exact"]]
    assert (exact["unexplained"] == 0).all() and (exact["answers_changed"] <= exact["near_ties"]).all()
    assert summary["unexplained"] == 0 and exact["certified"].all()
    assert summary["figures"] == ["invariance.png", "invariance.pdf"]
    assert len(said(summary)) == 3


def test_a_threshold_of_another_arithmetic_certifies_nothing(own_copy: Path) -> None:
    config = config_of(own_copy, dtypes=["fp32", "bf16", "int8"], eager_dtypes=["fp32", "bf16"])
    identity = ModelIdentity.of(load(own_copy), own_copy, dtype="float32")
    ways, left_out = ways_of(config, own_copy, "cpu", identity)
    assert [(way.name, way.certified) for way in ways] == [("fp32 eager", True), ("bf16 eager", False)]
    assert ways[0].threshold == ways[1].threshold
    assert left_out == ["int8 needs runner=native, and here it is eager"]
    plain = next(each for each in load_artifacts(own_copy) if each.measure is Measure.state)
    replace(plain, identity=replace(plain.identity, dtype="bfloat16")).save(own_copy / "calibration")
    ways, _ = ways_of(config, own_copy, "cpu", identity)
    assert [(way.artifact, way.certified) for way in ways] == [("state-risk", True), ("state-risk-bfloat16", True)]


@pytest.mark.skipif(available() is not None, reason="the native runner cannot be built here")
def test_every_dtype_and_runner_beside_each_other(certified: Path, tmp_path: Path) -> None:
    config = config_of(
        certified / "model", n=8, rules=[BatchRule.own, BatchRule.quantile], batches=[4], runner=RunnerName.native,
        dtypes=["fp32", "bf16", "int8"], eager_dtypes=["fp32"],
    )  # fmt: skip
    assert invariance.run(config, tmp_path) == 0
    rows = summary_of(tmp_path)["rows"]
    told = Counter((row["dtype"], row["runner"]) for row in rows)
    assert told == {("fp32", "native"): 4, ("bf16", "native"): 4, ("int8", "native"): 4, ("fp32", "eager"): 2}
    assert all(row["parted"] == 0 for row in rows if row["row_exact"] and row["runner"] == "native")


def test_a_run_goes_on_where_it_was(certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[BatchRule, int, str]] = []
    traces = Decoder.traces

    def counted(self: Decoder, way: Any, rule: BatchRule, batch: int, order: str, policy: Any = None) -> Any:
        if order == "shuffled" and rule is BatchRule.compact and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        decoded.append((rule, batch, order))
        return traces(self, way, rule, batch, order, policy)

    stopped: list[bool] = []
    monkeypatch.setattr(Decoder, "traces", counted)
    config = config_of(certified / "model", n=8, rules=[BatchRule.own, BatchRule.compact], batches=[4])
    with pytest.raises(KeyboardInterrupt):
        invariance.run(config, tmp_path)
    assert len(decoded) == 2 + 3  # full depth and the rows alone first
    decoded.clear()
    assert invariance.run(config, tmp_path) == 0
    assert decoded[2:] == [(BatchRule.compact, 4, "shuffled")]
    decoded.clear()
    assert invariance.run(config, tmp_path) == 0 and decoded == []
    assert len(summary_of(tmp_path)["rows"]) == 4


def test_a_trial_that_fails_leaves_the_others(certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Decoder.traces

    def failing(self: Decoder, way: Any, rule: BatchRule, *rest: Any) -> Any:
        if rule is BatchRule.sync:
            raise CalmError("no")
        return traces(self, way, rule, *rest)

    monkeypatch.setattr(Decoder, "traces", failing)
    config = config_of(certified / "model", n=8, rules=[BatchRule.own, BatchRule.sync], batches=[4], orders=["given"])
    assert invariance.run(config, tmp_path) == invariance.UNFINISHED
    assert summary_of(tmp_path)["failed"] == {"fp32-eager-sync-4-given": "no"}


def test_what_cannot_be_asked_is_one_line(certified: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8 needs runner=native"):
        InvarianceConfig(eager_dtypes=["int8"])
    with pytest.raises(ConfigError, match="orders"):
        InvarianceConfig(orders=["backwards"])
    with pytest.raises(ConfigError, match="batches needs at least one entry"):
        InvarianceConfig(batches=[])
    with pytest.raises(ConfigError, match="n must"):
        InvarianceConfig(n=1)
    with pytest.raises(ConfigError, match="int8 needs runner=native, and here it is eager"):
        invariance.run(config_of(certified / "model", dtypes=["int8"]), tmp_path)
    with pytest.raises(CalibrationError, match="was not tested at tolerance 0.31"):
        invariance.run(config_of(certified / "model", tolerance=0.31), tmp_path)


def row_of(rule: str, changed: int, risk: float, minus: float, **values: Any) -> dict[str, Any]:
    exact = rule in ("own", "compact", "rebatch")
    row: dict[str, Any] = {"dtype": "fp32", "runner": "native", "rule": rule, "batch": 16, "order": "shuffled"}
    row |= {"row_exact": exact, "articles": 100, "answers_changed": changed, **share("changed", changed, 100)}
    row |= {"risk": risk, "risk_low": risk - 0.01, "risk_high": risk + 0.01}
    row |= {"minus_own": minus, "minus_own_low": minus - 0.004, "minus_own_high": minus + 0.006}
    return {**row, "unexplained": 0 if exact else None, **values}


def about(rows: list[dict[str, Any]], certified: bool = True) -> dict[str, Any]:
    ways = [{"way": way, "certified": certified} for way in ("fp32 native", "bf16 eager")]
    return {"rows": rows, "ways": ways, "articles": 100, "tolerance": 0.05, "quantile": 0.5, "config": {}}


def test_words_follow_the_numbers() -> None:
    rows = [
        row_of("own", 0, 0.02, 0.0), row_of("sync", 50, 0.005, -0.015), row_of("quantile", 80, 0.09, 0.07)
    ]  # fmt: skip
    exact, coupled, risk = said(about(rows))
    assert "not one of 100 answers changes in fp32 native (95 %: below 3.6 %)" in exact
    assert "sync 50.0 % [39.8, 60.2]; quantile 0.5 80.0 %" in coupled
    assert "Mean loss of the certified threshold at batch 16" in risk
    assert "own 2.0 % [1.0, 3.0], below the tolerance" in risk
    assert "sync 0.5 % [-0.5, 1.5], lower than a row's own by 1.5 % [0.9, 1.9], below the tolerance" in risk
    assert "higher than a row's own by 7.0 % [6.6, 7.6], above the tolerance" in risk

    rows = [
        row_of("own", 3, 0.045, 0.0, unexplained=1), row_of("sync", 50, 0.06, 0.001),
        row_of("own", 9, 0.02, 0.0, dtype="bf16", runner="eager", unexplained=None),
    ]  # fmt: skip
    exact, coupled, risk = said(about(rows, certified=False))
    assert "fp32 native at most 3.0 %" in exact and "own at batch 16; 1 without a near tie" in exact
    assert "bf16 eager at most 9.0 %" in exact and "not one" not in exact
    assert "has no certificate in this arithmetic" in risk
    assert "cannot be told apart from a row's own, above" not in risk
    assert "sync 6.0 % [5.0, 7.0], cannot be told apart from a row's own" in risk
    assert "own 4.5 % [3.5, 5.5], not told apart from the tolerance" in risk
    assert len(said(about([row_of("own", 2, 0.02, 0.0)]))) == 1
    assert "all of them near ties" in said(about([row_of("own", 2, 0.02, 0.0)]))[0]


def test_the_figure_shows_zeros_the_tolerance_and_full_depth() -> None:
    rows = []
    for batch in (1, 16):
        for order in ("given", "shuffled")[: 1 if batch == 1 else 2]:
            for rule, changed in (("own", 0), ("compact", 0), ("sync", 40), ("quantile", 70)):
                rows.append(
                    row_of(rule, changed if batch > 1 else 0, 0.02 + changed / 1000, 0, batch=batch, order=order)
                )
    rows += [{**row, "dtype": "int8"} for row in rows if row["order"] == "shuffled"]
    axes = draw_panels(panels_of("invariance", about(rows)))
    assert [ax.get_title() for ax in axes] == [
        "answers: fp32, native runner", "answers: batch 16, by dtype", "risk: fp32, native runner"
    ]  # fmt: skip
    names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert names == ["own, compact", "sync", "quantile 0.5"]
    assert axes[0].get_ylim()[0] < 0  # so that a line of zeros does not lie on the frame
    assert [text.get_text() for text in axes[1].texts].count("0") == 4
    assert {"tolerance", "full depth"} <= {text.get_text() for text in axes[2].texts}
    assert "95 % interval" in axes[2].get_ylabel()
