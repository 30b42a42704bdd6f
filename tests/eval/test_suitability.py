"""Layers along the full model's answer: against the reference decoder, a story written beforehand, and plain loops."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calm import BatchDecoder, Full
from calm.config import Backfill, Measure
from calm.data.text import encode_source
from calm.errors import CheckpointError, ConfigError, DataError
from calm.experiment_config import SuitabilityConfig
from calm.metrics import bootstrap_ci, with_ratio
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from calm.policies import Confident, Oracle
from calm.records import Example
from calm.report_plots import draw_panels, panels_of
from calm.thresholds import ThresholdSchedule
from eval import layer_answers, suitability
from eval.layer_answers import answers, depths, open_any

from ..scripted import early_exit, examples, id_tokenizer, random_t5, scripted
from .folders import VOCABULARY, jsonl_settings, random_folder, write_jsonl

LAYERS = 4


def test_depths_are_what_a_loop_over_layers_finds() -> None:
    generator = np.random.default_rng(2)
    said = generator.integers(0, 3, (6, 200))
    first, settled = depths(said)
    for token, words in enumerate(said.T.tolist()):
        assert first[token] == next(layer for layer, word in enumerate(words, 1) if word == words[-1])
        assert settled[token] == next(n for n in range(1, 7) if all(word == words[-1] for word in words[n - 1 :]))


def test_a_story_settles_where_it_was_written_to() -> None:
    model = EarlyExitT5(scripted(), id_tokenizer(20), EarlyExitSettings([1, 2, 3, 4, 5], max_target_tokens=12)).eval()
    found = answers(model, [Example(id=w, family=w, source=w, target="w3") for w in ("w3", "w4")], batch_size=2)
    assert [row["first"] for row in found] == [[1, 1, 4, 1, 1], [1, 6, 1]]
    assert [row["settled"] for row in found] == [row["first"] for row in found]
    assert [row["agree"] for row in found] == [[4, 4, 4, 5, 5, 5], [2, 2, 2, 2, 2, 3]]
    assert [row["ended"] for row in found] == [True, True] and [row["near_ties"] for row in found] == [0, 0]


def test_layers_are_those_of_the_reference_decoder() -> None:
    model = early_exit(random_t5(vocabulary=VOCABULARY, decoder_layers=LAYERS))
    rows = examples(VOCABULARY, 20)
    found = answers(model, rows, batch_size=7)
    oracle = BatchDecoder(model, backfill=Backfill.true)(rows, Oracle())
    assert [tuple(row["first"]) for row in found] == [trace.crossing_layers for trace in oracle]
    assert len({depth for row in found for depth in row["first"]}) == LAYERS
    assert [row["tokens"] for row in found] == [len(trace.tokens) for trace in BatchDecoder(model)(rows, Full())]
    for measure, name, start in ((Measure.softmax, "margin", 0), (Measure.state, "cosine", 1)):
        decoder = BatchDecoder(model, record_confidences=True)
        for row, trace in zip(found, decoder(rows, Confident(measure, ThresholdSchedule(1.0))), strict=True):
            sums = np.array(trace.confidences)[:, start : LAYERS - 1].sum(axis=0)
            np.testing.assert_allclose(row[name][: LAYERS - 1 - start], sums, atol=1e-4)


def test_means_are_over_tokens_and_intervals_over_articles() -> None:
    config, generator = SuitabilityConfig(bootstrap=400), np.random.default_rng(0)
    tokens = generator.integers(3, 20, 150)
    sums = np.array([generator.binomial(count, 0.7) for count in tokens])
    found = with_ratio("agree", sums, tokens, config.seed, config.bootstrap)
    assert found["agree"] == pytest.approx(sums.sum() / tokens.sum())
    drawn = [generator.integers(0, 150, 150) for _ in range(2_000)]
    low, high = np.quantile([sums[pick].sum() / tokens[pick].sum() for pick in drawn], [0.025, 0.975])
    assert (found["agree_low"], found["agree_high"]) == pytest.approx((low, high), abs=0.01)
    same = np.full(150, 5)
    plain = with_ratio("x", sums, same, config.seed, config.bootstrap)
    assert (plain["x_low"], plain["x_high"]) == pytest.approx(bootstrap_ci(sums / 5, 0, 400))
    row = suitability.oracle_row(np.array([[2, 0, 0, 2], [0, 0, 0, 4]]), np.array([4, 4]), config)
    assert (row["depth"], row["skipped"]) == (pytest.approx(3.25), pytest.approx(1 - 3.25 / 4))
    assert row["skipped_low"] == pytest.approx(0) and row["skipped_high"] == pytest.approx(1 - 2.5 / 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as transformers writes them."""
    model, where = early_exit(random_t5(vocabulary=VOCABULARY)), tmp_path_factory.mktemp("plain")
    model.hf.save_pretrained(where)
    model.tokenizer.save_pretrained(where)
    return where


def measured(config: SuitabilityConfig, run_dir: Path) -> dict[str, object]:
    run_dir.mkdir(exist_ok=True)
    assert suitability.run(config, run_dir) == 0
    summary: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_the_program_on_a_folder_of_ours_and_on_the_same_t5_as_published(
    folder: Path, plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SuitabilityConfig(str(folder), n=30, batch_size=8, batches=[1, 4], bootstrap=50)
    found = measured(config, tmp_path / "ours")
    assert (found["articles"], found["num_layers"], found["early_exit_folder"]) == (30, LAYERS, True)
    layers = pd.DataFrame(found["layers"])
    assert layers["agree"].iloc[-1] == 1.0 and layers["first"].sum() == pytest.approx(1)
    assert layers["settled"].sum() == pytest.approx(1) and layers["cosine"].isna().tolist() == [True, *[False] * 3]
    for name in ("agree", "margin"):
        assert (layers[f"{name}_low"] <= layers[name]).all() and (layers[name] <= layers[f"{name}_high"]).all()
    rows = pd.read_parquet(tmp_path / "ours" / "rows.parquet")
    assert len(rows) == 30 and rows["tokens"].sum() == found["tokens"]
    assert found["figures"] == ["suitability.png", "suitability.pdf"]
    bounds = pd.DataFrame(found["bounds"])
    assert list(zip(bounds["batch"], bounds["checks"], strict=True)) == [
        (batch, checks) for batch in (1, 4) for checks in ("state", "softmax")
    ]
    assert (bounds["bound_low"] <= bounds["bound"]).all() and (bounds["bound"] <= bounds["most"]).all()

    published = replace(config, checkpoint=str(plain_folder), data=jsonl_settings(folder.parent / "rows.jsonl"))
    same = measured(published, tmp_path / "plain")
    assert not same["early_exit_folder"]
    for name in ("articles", "tokens", "layers", "oracle", "bounds", "step_bytes_per_token"):
        assert same[name] == found[name]

    def never(*asked: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(layer_answers, "answers", never)
    again = measured(config, tmp_path / "ours")
    assert again["layers"] == found["layers"] and again["verdict"] == found["verdict"]


def change(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
        (change("config.json", '{"model_type": "bart"}'), "expected one of 't5'"),
        (lambda folder: id_tokenizer(VOCABULARY + 5).save_pretrained(folder), "has 65 words and the model 60"),
    ],
)
def test_a_folder_that_cannot_be_measured_is_one_line(
    plain_folder: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "damaged")
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        open_any(folder, jsonl_settings(tmp_path / "rows.jsonl"), "cpu")


def test_what_is_missing_is_said(folder: Path, plain_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a corpus with data=NAME"):
        suitability.run(SuitabilityConfig(str(plain_folder)), tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        suitability.run(SuitabilityConfig(str(tmp_path / "nothing")), tmp_path)
    with pytest.raises(DataError):
        nobody = jsonl_settings(write_jsonl(tmp_path / "rows.jsonl", []))
        suitability.run(SuitabilityConfig(str(folder), data=nobody), tmp_path)
    one = early_exit(random_t5(vocabulary=VOCABULARY, decoder_layers=1))
    one.hf.save_pretrained(tmp_path / "one")
    one.tokenizer.save_pretrained(tmp_path / "one")
    with pytest.raises(CheckpointError, match="one decoder layer"):
        open_any(tmp_path / "one", jsonl_settings(tmp_path / "rows.jsonl"), "cpu")
    broken = early_exit(random_t5(vocabulary=VOCABULARY))
    broken.hf.decoder.block[1].layer[2].layer_norm.weight.data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite in fp32"):
        source = encode_source(broken.tokenizer, "w5 w6", broken.settings)
        layer_answers.layers_of(broken, source, [4, 5])
    for wrong in ({"n": 0}, {"batches": []}, {"batches": [0]}, {"batches": [2, 2]}, {"bootstrap": 0}):
        with pytest.raises(ConfigError):
            SuitabilityConfig(**wrong)  # type: ignore[arg-type]


def test_the_figure_has_full_depth_units_and_both_panels() -> None:
    shares = {"first": 0.25, "settled": 0.25}
    between = {f"{name}{end}": 0.5 for name in ("agree", "margin", "cosine") for end in ("", "_low", "_high")}
    rows = [{"layer": layer, **shares, **between} for layer in range(1, LAYERS + 1)]
    rows[0] |= dict.fromkeys(("cosine", "cosine_low", "cosine_high"))  # type: ignore[arg-type]
    axes = draw_panels(panels_of("suitability", {"layers": rows}))
    assert [ax.get_xlabel() for ax in axes] == ["decoder layer"] * 2
    assert axes[0].get_ylabel() == "share of tokens (%), 95 % interval" and "95 % interval" in axes[1].get_ylabel()
    assert len(axes[0].patches) == 2 * LAYERS
    assert [len(line.get_xdata()) for line in axes[1].lines[:2]] == [LAYERS - 1, LAYERS]
    assert all(any(text.get_text() == "full depth" for text in ax.texts) for ax in axes)
