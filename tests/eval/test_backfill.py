"""What fills skipped layers: errors against the modules' own states, quality against what is counted by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from calm.calibration import load_artifacts
from calm.checkpoint import write_json
from calm.config import Backfill, Measure, Schedule
from calm.data.text import encode_source
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import CalibrationError, CalmError, ConfigError
from calm.experiment_config import BackfillConfig
from calm.metrics import rouge_l
from calm.models.t5 import EarlyExitT5, export_spec
from calm.models.t5_adapter import T5Adapter
from calm.policies import Confident, Full
from calm.records import DecodeTrace, Example
from calm.report_plots import draw_panels, panels_of
from calm.thresholds import ThresholdSchedule
from eval import backfill
from eval.backfill_rows import Answers, answered, grouped, positions, states, work
from eval.backfill_states import measure_states, replay

from ..scripted import early_exit, examples, random_t5

LAYERS, LENGTH = 4, 6
CONFIG = BackfillConfig(least=1, bootstrap=20)


@pytest.fixture(scope="module")
def model() -> EarlyExitT5:
    return early_exit(random_t5(decoder_layers=LAYERS), length=LENGTH)


def exits(threshold: float = 0.15) -> Confident:
    return Confident(Measure.softmax, ThresholdSchedule(threshold, Schedule.constant, length=LENGTH))


@torch.inference_mode()
def by_hand(model: EarlyExitT5, example: Example, trace: DecodeTrace, variant: str, cache: str) -> dict[Any, Any]:
    """(position, layer) -> errors of K and V, with the reference decoder's adapter, one token after the other."""
    adapter, found = T5Adapter(model), {}
    source = encode_source(model.tokenizer, example.source, model.settings)
    true, mine, said = adapter.prefill(source), adapter.prefill(source), adapter.start_token_id
    for step, (token, left) in enumerate(zip(trace.tokens, trace.emission_layers, strict=True)):
        hidden, hiddens = adapter.embed(said, step), []
        for layer in range(1, LAYERS + 1):
            hidden = adapter.layer(layer, hidden, true, step)
            hiddens.append(hidden)
        exit_hidden, below = hiddens[left - 1], true
        if cache == "own":
            exit_hidden, below = adapter.embed(said, step), mine
            for layer in range(1, left + 1):
                exit_hidden = adapter.layer(layer, exit_hidden, mine, step)
        for layer in range(left + 1, LAYERS + 1):
            pair = adapter.kv(layer, exit_hidden) if variant == "project" else adapter.read_kv(left, below, step)
            if cache == "own":
                adapter.write_kv(layer, mine, step, *pair)
            right = adapter.read_kv(layer, true, step)
            found[step + 1, layer] = [float((a - b).norm() / b.norm()) for a, b in zip(pair, right, strict=True)]
        said = token
    return found


def test_errors_of_keys_and_values_are_those_of_the_reference_decoder(model: EarlyExitT5) -> None:
    rows = examples(97, 5, seed=3)
    traces = BatchDecoder(model)(rows, exits())
    assert len({layer for trace in traces for layer in trace.emission_layers}) > 2
    errors, _ = measure_states(model, rows, traces, batch_size=2)
    for variant, cache in (("project", "own"), ("project", "true"), ("copy", "own"), ("copy", "true")):
        part = errors[(errors["variant"] == variant) & (errors["cache"] == cache)]
        for number, (row, trace) in enumerate(zip(rows, traces, strict=True)):
            mine = part[part["article"] == number].set_index(["position", "layer"])
            expected = by_hand(model, row, trace, variant, cache)
            assert sorted(mine.index) == sorted(expected)
            for where, pair in expected.items():
                assert mine.loc[where, ["key", "value"]].tolist() == pytest.approx(pair, rel=1e-3, abs=1e-4)
                assert mine.loc[where, "skipped"] == where[1] - trace.emission_layers[where[0] - 1]
    alone = errors[(errors["variant"] == "project") & (errors["cache"] == "true")]
    assert alone[alone["skipped"] == 1][["key", "value"]].max().max() < 1e-5  # that layer reads the exit's hidden
    assert alone[alone["skipped"] == 1]["cosine"].min() > 1 - 1e-5 and alone[alone["skipped"] > 1]["key"].min() > 0.01
    last = errors[(errors["variant"] == "other article") & (errors["article"] == len(rows) - 1)]
    assert last.empty  # it sits alone in its batch


def test_cosines_are_of_the_hidden_states_that_teacher_forcing_gives(model: EarlyExitT5) -> None:
    rows = examples(97, 4, seed=5)
    traces = BatchDecoder(model)(rows, exits())
    _, cosines = measure_states(model, rows, traces, batch_size=4)
    for number, (row, trace) in enumerate(zip(rows, traces, strict=True)):
        source = torch.tensor([encode_source(model.tokenizer, row.source, model.settings)])
        read = torch.tensor([[0, *trace.tokens[:-1]]])
        mask = torch.ones_like(source, dtype=torch.bool)
        with torch.inference_mode():
            hiddens = model.decoder_hiddens(model.encode(source, mask), mask, read)
        for layer in range(2, LAYERS + 1):
            here = cosines[(cosines["article"] == number) & (cosines["layer"] == layer)].sort_values("position")
            for name, other in (("previous", hiddens[layer - 2]), ("last", hiddens[-1])):
                expected = torch.cosine_similarity(hiddens[layer - 1], other, dim=-1)[0]
                assert here[name].to_numpy() == pytest.approx(expected.numpy(), abs=1e-5)
            assert here["above_exit"].tolist() == [left < layer for left in trace.emission_layers]


def test_a_replay_of_a_variant_says_its_tokens_and_no_other_is_taken(model: EarlyExitT5) -> None:
    row = examples(97, 1, seed=2)[0]
    source = torch.tensor([encode_source(model.tokenizer, row.source, model.settings)])
    mask = torch.ones_like(source, dtype=torch.bool)
    with torch.inference_mode():
        encoded = model.encode(source, mask)
        for way in (Backfill.project, Backfill.copy):
            trace = OneDecoder(model, backfill=way)([row], exits())[0]
            tokens, left = torch.tensor([trace.tokens]), torch.tensor([trace.emission_layers])
            found = replay(export_spec(model), encoded, mask, tokens, left, way)
            assert model.logits(found.hiddens[-1]).argmax(-1).tolist() == tokens.tolist()
        with pytest.raises(ValueError, match="backfill mask writes no keys"):
            replay(export_spec(model), encoded, mask, tokens, left, Backfill.mask)


def trace_of(name: str, *tokens: int) -> DecodeTrace:
    layers = (LAYERS,) * len(tokens)
    return DecodeTrace(name, tokens, "", layers, layers, layers, (0,) * len(tokens))


def test_agreement_is_counted_position_by_position() -> None:
    full = [trace_of("a", 5, 6, 1), trace_of("b", 7, 8, 9, 1), trace_of("c", 4, 1), trace_of("d", 3, 1)]
    mine = [trace_of("a", 5, 6, 1), trace_of("b", 7, 9, 9, 1), trace_of("c", 1), trace_of("d", 2, 1)]
    rows = positions(replace(CONFIG, least=2), mine, full)
    found = [(row["position"], row["articles"], row["equal"], row["prefix"], row.get("next")) for row in rows]
    # at 2 three answers are right so far, one goes on so; at 3 two articles have a token, one of them right so far
    assert found == [(1, 4, 0.5, 0.5, 0.5), (2, 4, 0.5, 0.25, 0.5), (3, 2, 1.0, 0.5, None)]


def test_means_are_of_articles_and_small_groups_are_left_out() -> None:
    df = pd.DataFrame({"article": [0, 0, 0, 1, 1], "skipped": [1, 1, 2, 1, 1], "key": [1.0, 3.0, 9.0, 5.0, 5.0]})
    (row,) = grouped(replace(CONFIG, least=2), df, "error", ["skipped"], ["key"])
    assert (row["skipped"], row["articles"], row["tokens"], row["key"]) == (1, 2, 4, 3.5)


def test_work_is_counted_from_shapes(model: EarlyExitT5) -> None:
    spec = export_spec(model)  # d 32, inner 32, gated feed-forward of 64
    layer = 6 * 32 * 32 + 3 * 32 * 64 + 2 * 32 * (5 + 9)
    true, project, copy = (work(spec, name, 2.0, 5, 9) for name in ("true", "project", "copy"))
    assert true["fill_macs"] == true["layer_macs"] == layer and true["layers_with_fill"] == LAYERS
    assert true["fill_row_bytes"] == 4 * 2 * 32 * (5 + 9)
    assert project["fill_macs"] == 2 * 32 * 32 and project["fill_weight_bytes"] == 4 * 2 * 32 * 32
    assert project["layers_with_fill"] == pytest.approx(2 + 2 * 2 * 32 * 32 / layer)
    assert (copy["fill_macs"], copy["fill_weight_bytes"], copy["layers_with_fill"]) == (0, 0, 2.0)


def test_quality_is_of_the_variants_own_answers(model: EarlyExitT5) -> None:
    rows = [replace(row, target=f"w3 {row.source}") for row in examples(97, 12, seed=7)]
    answers = Answers(model, rows, exits(), batch_size=5)
    full = OneDecoder(model)(rows, Full())
    ceiling = OneDecoder(model, backfill=Backfill.true)(rows, exits())
    for way in (Backfill.project, Backfill.mask):
        row = answered(CONFIG, answers, way.value)[0]
        mine = OneDecoder(model, backfill=way)(rows, exits())
        scores = [rouge_l(trace.text, each.target) for trace, each in zip(mine, rows, strict=True)]
        best = [rouge_l(trace.text, each.target) for trace, each in zip(ceiling, rows, strict=True)]
        assert row["rouge_l"] == pytest.approx(np.mean(scores))
        assert row["rouge_l_minus_true"] == pytest.approx(np.mean(scores) - np.mean(best))
        assert row["equal_rows"] == np.mean([a.tokens == b.tokens for a, b in zip(mine, full, strict=True)])
        assert row["layers"] == np.mean([layer for trace in mine for layer in trace.emission_layers])
    with pytest.raises(CalmError, match="left before the last layer"):
        states(CONFIG, Answers(model, rows, Full(), batch_size=5))


def test_the_program_on_a_certified_model(certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = next(a for a in load_artifacts(certified / "model") if a.measure is Measure.state)
    asked: dict[str, Any] = {"n": 40, "tolerance": 0.45, "least": 2, "bootstrap": 20, "batch_size": 16}
    asked |= {"clock_batches": [2], "clock_repeats": 3, "passes": [2, 4, 99]}
    config = BackfillConfig(str(certified / "model"), measure=Measure.state, **asked)
    assert backfill.run(config, tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["artifact"] == "state-risk" and summary["threshold"] == artifact.certificates[0].threshold
    assert summary["articles"] == 40 and not summary["failed"]
    rows = pd.DataFrame(summary["rows"])
    quality = rows[rows["kind"] == "quality"].set_index("variant")
    assert list(quality.index) == ["full", "true", "project", "copy", "mask"]
    assert quality.loc["full", "to_full"] == 1.0 and quality.loc["true", "rouge_l_minus_true"] == 0.0
    assert (quality["rouge_l_low"] <= quality["rouge_l"]).all() and (quality["fill_of_a_layer"] <= 1).all()
    errors = {"error", "error_by_exit", "error_by_position"}
    assert set(rows["kind"]) == {"quality", "position", "hidden", "hidden_above_exit", "clock", "pass", *errors}
    clock = rows[rows["kind"] == "clock"]
    assert list(zip(clock["batch"], clock["skipped"], strict=True)) == [(2, 1), (2, 2), (2, 3)]
    assert (clock["of_true"] == clock["fill_s"] / clock["layers_s"]).all() and (clock["fill_s"] > 0).all()
    passes = rows[rows["kind"] == "pass"]
    told = [(above, count) for above in (1, 2, 3) for count in (2, 4)]
    assert list(zip(passes["skipped"], passes["positions"], strict=True)) == told
    assert (passes["pass_s"] > 0).all() and (passes["fill_s"] > 0).all() and (passes["layers_s"] > 0).all()
    ratio = passes["pass_s"] / (passes["positions"] * passes["layers_s"])
    assert np.allclose(passes["of_layers"], ratio)
    assert summary["figures"] == ["backfill.png", "backfill.pdf"]
    assert len(pd.read_parquet(tmp_path / "rows.parquet")) == len(rows)
    (record,) = tmp_path.glob("trials/*/answers-copy.json")
    write_json(record, {"state": "running"})
    assert backfill.run(config, tmp_path) == 0  # only that one again, and the same
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_what_cannot_be_asked_is_one_line(own_copy: Path, tmp_path: Path) -> None:
    for wrong in ({"n": 0}, {"tolerance": 1.0}, {"least": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BackfillConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="was not tested at tolerance 0.02"):
        backfill.run(BackfillConfig(str(own_copy), tolerance=0.02), tmp_path)
    with pytest.raises(CalibrationError, match="only full depth is certified for tolerance 0.45"):
        backfill.run(BackfillConfig(str(own_copy), tolerance=0.45, measure=Measure.classifier), tmp_path)
    for path in (own_copy / "calibration").iterdir():
        path.unlink()
    with pytest.raises(CalibrationError, match="no calibration risk"):
        backfill.run(BackfillConfig(str(own_copy), tolerance=0.45), tmp_path)


def test_the_figure_has_full_depth_units_and_every_way() -> None:
    def spread(*names: str) -> dict[str, float]:
        return {f"{name}{end}": value for name in names for end, value in (("", 0.5), ("_low", 0.4), ("_high", 0.6))}

    ways = ("full", "true", "project", "copy", "mask")
    rows: list[dict[str, Any]] = [{"kind": "quality", "variant": way, **spread("rouge_l")} for way in ways]
    rows += [{"kind": "position", "variant": w, "position": t, **spread("equal")} for w in ways[1:] for t in (1, 2)]
    rows += [
        {"kind": "error", "variant": way, "cache": cache, "skipped": d, **spread("key", "value")}
        for way, cache in (("project", "own"), ("project", "true"), ("copy", "own"), ("other article", "true"))
        for d in (1, 2)
    ]
    axes = draw_panels(panels_of("backfill", {"rows": rows}))
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == list(ways[1:])
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == list(ways[1:])
    assert all(any(text.get_text() == "full depth" for text in ax.texts) for ax in axes[:2])
    assert all("95 % interval" in ax.get_ylabel() for ax in axes)
