"""Drafts by simulation are those that are decoded; the program; what is said and drawn of made-up numbers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calm.architectures import spec_of
from calm.config import Measure, RunnerName
from calm.cost import head_work, layer_work
from calm.decode_batch import BatchDecoder
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.experiment_config import SpeculativeConfig
from calm.models.speaking import SpeakingModel
from calm.policies import Policy
from calm.records import DecodeTrace, Example
from calm.report_plots import draw_panels, panels_of
from calm.speculative import SpeculativeBatch
from eval import speculative, speculative_clock
from eval.report.answer import answered
from eval.report.evidence import drafts, gathered
from eval.said.speculative import lossless, said
from eval.speculative_clock import timed_at
from eval.speculative_peer import peer_rows
from eval.speculative_simulated import (
    Course,
    Spent,
    chosen,
    draft_from,
    draft_row,
    draft_values,
    drafts_of,
    paths,
    simulated,
    spent,
)

from ..causal import early_llama, random_llama
from ..scripted import early_exit, examples, random_t5

V = 97
CONFIG = SpeculativeConfig(bootstrap=20, lengths=[1, 3], thresholds=[0.0, 0.3], batch_size=8)


def models() -> list[SpeakingModel]:
    return [early_exit(random_t5(seed=1)), early_llama(random_llama(seed=1))]


@pytest.mark.parametrize("model", models(), ids=["t5", "llama"])
@pytest.mark.parametrize("measure", [Measure.softmax, Measure.state])
def test_what_is_simulated_is_what_is_decoded(model: SpeakingModel, measure: Measure) -> None:
    """Words, rounds and accepted words exactly; what is drafted behind a wrong word need not be the same."""
    rows = examples(V, 16, seed=3)
    along, otherwise = paths(model, rows, measure, 8)
    assert otherwise == 0 and all(path.words.shape == (4, len(path.tokens)) for path in along)
    for draft in (Draft(1, 2), Draft(3, 4), Draft(3, 4, measure, 0.3), Draft(2, 1, measure, 0.6)):
        traces = SpeculativeBatch(model, draft)(rows)
        found = [spent(path, draft, 12, 1, measure is Measure.softmax) for path in along]
        for trace, one, path in zip(traces, found, along, strict=True):
            assert (one.rounds, one.accepted) == (trace.rounds, trace.accepted)
            assert one.said == len(trace.tokens) - path.begin
            assert one.looks >= one.drafted and one.read <= one.drafted + one.rounds
    exact = [spent(path, Draft(3, 1), 12, 1, True) for path in along]
    traces = SpeculativeBatch(model, Draft(3, 1))(rows)
    assert [one.drafted for one in exact] == [trace.drafted for trace in traces]  # nothing stands behind a wrong word


def test_a_draft_by_hand() -> None:
    """The answer is 5 6 7 </s>; layer 1 says 5 9 7 </s>, of which it is not sure of the 7."""
    words = np.array([[5, 9, 7, 1], [5, 6, 7, 1]])
    path = Course((5, 6, 7, 1), words, np.array([[0.9, 0.9, 0.2, 0.9]] * 2), 0)
    # round 1 drafts 5 9 7 and reads a fourth position in vain, says 5 6; round 2 drafts 7 </s>, which is the end
    assert spent(path, Draft(1, 3), 12, 1, True) == Spent(4, 2, 5, 3, 6, 5)
    # round 1 drafts 5 9 and throws the 7 away; round 2 throws it away too and says it; round 3 drafts the end
    unsure = Draft(1, 3, Measure.softmax, 0.5)
    assert spent(path, unsure, 12, 1, True) == Spent(4, 3, 3, 2, 5, 5)
    assert spent(path, unsure, 12, 1, False) == Spent(4, 3, 3, 2, 5, 3)
    # with room for three tokens nothing is drafted at the third
    cut = replace(path, tokens=(5, 6, 7))
    assert spent(cut, Draft(1, 3), 3, 1, True) == Spent(3, 2, 2, 1, 4, 2)


def test_costs_are_counted_from_what_was_read() -> None:
    spec = spec_of(early_exit(random_t5()))
    head = head_work(spec).weight_bytes / layer_work(spec).weight_bytes
    row = draft_row(CONFIG, spec, Draft(1, 3), [Spent(4, 2, 5, 3, 6, 5), Spent(4, 2, 5, 3, 6, 5)])
    assert row["acceptance"] == pytest.approx(0.6) and row["words_a_round"] == 2.0
    assert row["layer_passes"] == (1 * 6 + 3 * 2) / 4 and row["head_passes"] == (5 + 2) / 4
    assert row["layers_run"] == 4 * 6 / 4
    assert row["fewer_passes"] == pytest.approx((4 + head) / (3 + head * 7 / 4))
    assert row["fewer_passes_low"] <= row["fewer_passes"] <= row["fewer_passes_high"]
    nothing = draft_row(CONFIG, spec, Draft(1, 3), [Spent(4, 4, 0, 0, 4, 4)])
    assert nothing["acceptance"] is None


def test_every_draft_that_says_something_is_tried() -> None:
    found = drafts_of(replace(CONFIG, measure=Measure.state), 3)
    assert found == [
        Draft(1, 1), Draft(1, 3), Draft(2, 1), Draft(2, 1, Measure.state, 0.3), Draft(2, 3),
        Draft(2, 3, Measure.state, 0.3),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="layer 3 lies outside"):
        drafts_of(replace(CONFIG, layers=[3]), 3)
    with pytest.raises(ConfigError, match="leave no draft"):
        drafts_of(replace(CONFIG, measure=Measure.state, layers=[1], thresholds=[0.5]), 3)
    assert [draft_from(draft_values(draft)) for draft in found] == found


def test_the_chosen_are_the_cheapest_of_different_layers() -> None:
    model, rows = early_exit(random_t5(seed=1)), examples(V, 8, seed=3)
    spec = spec_of(model)
    all_of_them = simulated(CONFIG, model, spec, rows)
    for count in (1, 3):
        found = chosen(replace(CONFIG, drafts=count), model, spec, rows)
        assert [row["layer"] for row in found] == list(dict.fromkeys(row["layer"] for row in found))
        for row in found:
            mine = [each["fewer_passes"] for each in all_of_them if each["layer"] == row["layer"]]
            assert row["fewer_passes"] == pytest.approx(max(mine))
        assert found[0]["fewer_passes"] == pytest.approx(max(each["fewer_passes"] for each in all_of_them))
        assert len(found) == count


def test_the_program_on_a_certified_model(certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"n": 30, "tolerance": 0.45, "engine": False}
    config = replace(CONFIG, checkpoint=str(certified / "model"), **asked)
    assert speculative.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = pd.DataFrame(summary["rows"])
    of_all, decoded = rows[rows["kind"] == "simulated"], rows[rows["kind"] == "decoded"]
    assert len(of_all) == 3 * 2 * 2 and len(decoded) == 3 and set(rows["kind"]) == {"chosen", "simulated", "decoded"}
    assert list(rows[rows["kind"] == "chosen"]["way"]) == list(decoded["way"])
    assert (decoded["changed"] == decoded["near_ties"]).all() and summary["unexplained"] == 0
    pairs = decoded.merge(of_all, on="way", suffixes=("", "_simulated"))
    assert (pairs["rounds"] == pairs["rounds_simulated"]).all()
    assert (pairs["words_a_round"] == pairs["words_a_round_simulated"]).all()
    assert summary["peer"].endswith("not T5") and not summary["noisy"]
    assert summary["figures"] == ["speculative.png", "speculative.pdf"]
    told = said(summary)
    assert told[0].startswith("Of 12 drafts, simulated, layer ") and "full depth's, word for word" in told[1]
    capsys.readouterr()


class StandIn:
    """What timed_at asks of an engine, answered by the reference decoders; its clock counts tokens."""

    runner_name = RunnerName.eager

    def __init__(self, model: SpeakingModel, rows: Sequence[Example]) -> None:
        self.model, self.rows = model, rows
        self.clock: Any = SimpleNamespace(history=[])

    def generate(self, sources: Sequence[Any], policy: Policy | None = None, draft: Draft | None = None) -> list[Any]:
        rows = self.rows[: len(sources)]
        decode: Any = BatchDecoder(self.model) if draft is None else SpeculativeBatch(self.model, draft)
        traces: list[DecodeTrace] = decode(rows, policy) if draft is None else decode(rows)
        steps = sum(trace.rounds or len(trace.tokens) for trace in traces)
        self.clock.history.append(SimpleNamespace(seconds={"layers": float(steps)}, tokens=1, layers=[1]))
        timing = SimpleNamespace(arrived=0.0, first_token=1.0, ended=2.0)
        return [
            SimpleNamespace(id=t.id, error="", tokens=t.tokens, timing=timing, emission_layers=t.emission_layers)
            for t in traces
        ]


def test_drafts_take_turns_with_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = early_exit(random_t5(seed=1)), examples(V, 6, seed=3)
    engine = StandIn(model, rows)
    monkeypatch.setattr(speculative_clock, "engine_of", lambda *asked: engine)
    served: Any = SimpleNamespace(to_ids=lambda text: [1], spec=spec_of(model), artifacts=[], identity=None)
    monkeypatch.setattr(speculative_clock, "exits", lambda *asked, **named: [])
    config = replace(CONFIG, timed=6, repeats=2, allow_noisy=True, threads=2)
    found = timed_at(config, "fp32", served, [Draft(3, 4)], rows, 2)
    assert [row["way"] for row in found] == ["full", "static 2", "draft 3 x 4"]
    assert [row["role"] for row in found] == ["full", "static", "draft"]
    assert found[0]["decode_tokens_ratio"] == 1.0 and found[2]["decode_tokens_ratio"] > 1.0
    assert found[2]["layers"] == 4.0 and found[1]["layers"] == 2.0 and found[1]["depth"] == 2


def test_transformers_own_drafts_stand_beside_its_greedy_search() -> None:
    model, rows = early_llama(random_llama(seed=1)), examples(V, 3, seed=3)
    config = replace(CONFIG, timed=3, repeats=1, warmups=0, allow_noisy=True)
    greedy, draft = peer_rows(config, model, [2], rows)
    assert greedy["way"] == "transformers" and greedy["tokens_ratio"] == 1.0
    assert (draft["layer"], draft["changed"], draft["tokens"]) == (2, 0, greedy["tokens"])


def timed(way: str, role: str, batch: int, ratio: float, **more: Any) -> dict[str, Any]:
    spans = {f"decode_tokens_ratio{end}": ratio + by for end, by in (("", 0.0), ("_low", -0.1), ("_high", 0.1))}
    return {"kind": "clock", "way": way, "role": role, "batch": batch, **spans, **more}


def made_up() -> dict[str, Any]:
    names = ("acceptance", "words_a_round", "fewer_passes")
    rows: list[dict[str, Any]] = [
        {
            "kind": "simulated", **draft_values(draft), "layer_passes": 5.0, "head_passes": 1.3,
            **{f"{name}{end}": value + by for name in names for end, by in (("", 0.0), ("_low", -0.1), ("_high", 0.1))},
        }
        for draft, value in ((Draft(1, 2), 0.6), (Draft(2, 4), 0.8), (Draft(2, 2, Measure.softmax, 0.5), 0.7))
    ]  # fmt: skip
    rows.append({"kind": "chosen", **draft_values(Draft(2, 4)), "fewer_passes": 0.9})
    same = {"kind": "decoded", "articles": 10, "changed": 0, "near_ties": 0}
    rows += [same | {"decoder": "reference", "dtype": "fp32"}] * 2
    rows += [same | {"decoder": "engine", "dtype": "fp32", "changed": 2, "near_ties": 2}]
    rows += [same | {"decoder": "engine", "dtype": "int8", "changed": 1, "near_ties": None}]
    rows += [
        timed("full", "full", 1, 1.0),
        timed("draft 2 x 4", "draft", 1, 1.4, layer=2, length=4, measure=None),
        timed("draft 1 x 2", "draft", 1, 1.2, layer=1, length=2, measure=None),
    ]
    rows += [
        timed("exit state", "exit", 1, 1.5),
        timed("static 4", "static", 1, 1.6),
        timed("static 4", "static", 8, 1.3),
    ]
    peer = {"kind": "peer", "tokens_ratio": 1.1, "tokens_ratio_low": 1.0, "tokens_ratio_high": 1.2}
    rows += [{**peer, "layer": None}, {**peer, "layer": 2}]
    return {"rows": rows, "num_layers": 8, "head_layers": 2.0, "noisy": True}


def test_sentences_name_the_best_draft_and_its_rivals() -> None:
    first, second, third, fourth, last = said(made_up())
    assert "layer 2 with at most 4 words, the best on dev: 80.0 [70.0, 90.0] % of its words" in first
    assert second == (
        "Answers of reference in fp32: all 20 are full depth's, word for word; engine in fp32: 2 of 10 are not full "
        "depth's, 2 of them at a near tie; engine in int8: 9 of 10 are full depth's, word for word."
    )
    assert "batch 1: draft 2 x 4 1.40 [1.30, 1.50], draft 1 x 2 1.20 [1.10, 1.30], exit state 1.50" in third
    assert "and static 4 1.60" in third
    assert "batch 8: static 4 1.30" in third and "1.10 [1.00, 1.20] times" in fourth and "noisy" in last


def test_the_report_tells_what_the_draft_of_dev_brings_without_loss() -> None:
    summary = made_up() | {"unexplained": 0}
    for row in summary["rows"]:
        if row["kind"] == "clock":
            row |= {f"tokens_ratio{end}": row[f"decode_tokens_ratio{end}"] for end in ("", "_low", "_high")}
    summary["rows"] = [row for row in summary["rows"] if row.get("batch") != 8]
    (told, busy) = lossless(summary)
    assert told == (
        "Drafts change no answer. By layer 2 with at most 4 words: batch 1: faster, 1.40 [1.30, 1.50] times full "
        "depth's decode steps and 1.40 [1.30, 1.50] times its whole calls."
    )
    assert "noisy" in busy
    for ratio, verdict in ((0.8, "slower"), (1.0, "not told apart")):
        slower = timed("draft 2 x 4", "draft", 1, ratio) | {"layer": 2, "length": 4, "measure": None}
        slower |= {f"tokens_ratio{end}": 1.0 for end in ("", "_low", "_high")}
        others = [row for row in summary["rows"] if row["kind"] != "clock" or row["way"] != "draft 2 x 4"]
        assert f"batch 1: {verdict}, " in lossless({**summary, "rows": [*others, slower]})[0]
    assert not lossless({**summary, "unexplained": 1})
    assert not lossless({**summary, "rows": [row for row in summary["rows"] if row["kind"] != "clock"]})
    answer = answered(gathered({"speculative": summary}, None, {}, []))
    assert answer.sentences["Without any loss"] == [told, busy]
    assert not drafts({"speculative": {"rows": [{"kind": "clock"}]}})


def test_the_figure_has_full_depth_and_a_panel_for_the_clock() -> None:
    summary = made_up()
    axes = draw_panels(panels_of("speculative", summary))
    assert len(axes) == 3 and all(ax.get_xlabel() and ax.get_ylabel() for ax in axes)
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["at most 2 words", "at most 4 words"]
    summary["rows"] = [row for row in summary["rows"] if row["kind"] == "simulated"]
    assert len(draw_panels(panels_of("speculative", summary))) == 2


def test_of_one_batch_size_each_way_stands_by_itself() -> None:
    summary = made_up()
    summary["rows"] = [row for row in summary["rows"] if row.get("batch") in (None, 1)]
    clock = panels_of("speculative", summary)[2]
    ways = [row["way"] for row in summary["rows"] if row["kind"] == "clock" and row["role"] != "full"]
    shown = [str(way).replace("\n", " ") for each in clock.series for way in each.x]
    assert clock.title == "on the clock, batch 1" and len(shown) == len(ways) > 1
    assert set(shown) == set(ways)


def test_wrong_settings_are_refused_by_name() -> None:
    for wrong in ({"n": 1}, {"lengths": []}, {"lengths": [2, 2]}, {"layers": [0]}, {"thresholds": [1.5]}, {"timed": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SpeculativeConfig(**wrong)  # type: ignore[arg-type]
