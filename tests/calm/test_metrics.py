"""ROUGE against its definition, means and intervals, lead-1, agreement and depth."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm import metrics
from calm.metrics import agreement, bootstrap_ci, depth_summary, lead1, mean, metric_signature, rouge_l, rouge_l_many
from calm.records import DecodeTrace

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "rouge_golden.json").read_text())["rows"]


def trace(name: str, tokens: tuple[int, ...], text: str = "", layers: tuple[int, ...] | None = None) -> DecodeTrace:
    layers = layers or (4,) * len(tokens)
    return DecodeTrace(name, tokens, text, layers, layers, layers, tuple(4 - layer for layer in layers))


@pytest.fixture(params=["native", "definition"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "definition":
        monkeypatch.setattr(metrics, "_has_native", lambda: False)
    return str(request.param)


def test_rouge_equals_the_golden_file(implementation: str) -> None:
    assert len(GOLDEN) >= 50
    for prediction, reference, score in GOLDEN:
        assert rouge_l(prediction, reference) == score, (prediction, reference)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_accelerator_equals_the_definition_on_any_text(prediction: str, reference: str) -> None:
    native, definition = metrics._scorer(True), metrics._scorer(False)
    expected = definition.score(reference, prediction)["rougeL"].fmeasure
    assert native.score(reference, prediction)["rougeL"].fmeasure == expected
    assert rouge_l(prediction, reference) == expected


def test_rouge_of_many_keeps_order_and_refuses_unequal_lengths() -> None:
    predictions, references, scores = zip(*GOLDEN, strict=True)
    assert rouge_l_many(predictions, references).tolist() == list(scores)
    assert rouge_l_many([], []).shape == (0,)
    with pytest.raises(ValueError, match="2 predictions for 1 references"):
        rouge_l_many(["a", "b"], ["a"])


def test_mean_over_five_ragged_rows() -> None:
    pairs = [row[:2] for row in GOLDEN[:5]]
    scores = rouge_l_many([p for p, _ in pairs], [r for _, r in pairs])
    assert scores == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0, 1])
    assert mean(scores) == pytest.approx(0.6)


def test_signature_names_what_decides_the_numbers(implementation: str) -> None:
    signature = metric_signature()
    for part in ("rougeL", "f1", "stem:porter", "split:none", "tok:", "rouge-score-0.1.2"):
        assert part in signature
    assert ("rouge-score-rs" in signature) == (implementation == "native")


def test_mean_refuses_nothing_and_nan() -> None:
    with pytest.raises(ValueError, match="got 0 values"):
        mean([])
    with pytest.raises(ValueError, match="1 of them NaN"):
        mean([0.5, math.nan])


def test_bootstrap_is_seeded_and_of_the_right_width() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, 400)
    low, high = bootstrap_ci(values, seed=3)
    assert (low, high) == bootstrap_ci(values, seed=3)
    assert (low, high) != bootstrap_ci(values, seed=4)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    inner = bootstrap_ci(values, seed=3, level=0.5)
    assert low < inner[0] < inner[1] < high


def test_bootstrap_refuses_what_it_cannot_resample() -> None:
    assert bootstrap_ci([0.25], seed=0) == (0.25, 0.25)
    with pytest.raises(ValueError, match="got 0 values"):
        bootstrap_ci([], seed=0)
    with pytest.raises(ValueError, match="n >= 1"):
        bootstrap_ci([0.1], seed=0, n=0)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One sentence. And another.", "One sentence."),
        ("Really? Yes.", "Really?"),
        ('He said "stop." Then he left.', 'He said "stop."'),
        ("no end here", "no end here"),
        ("It wraps\nover lines\n\nand has paragraphs.", "It wraps over lines"),
        ("Version 3.14 is out. Get it.", "Version 3.14 is out."),
        ("Uses tools, e.g. Make. Fast.", "Uses tools, e.g. Make."),
        ("J. K. Rowling wrote it. Twice.", "J. K. Rowling wrote it."),
        ("これは文です。次の文。", "これは文です。"),
        ("  \n ", ""),
        ("", ""),
    ],
)
def test_lead1_is_the_first_sentence(text: str, first: str) -> None:
    assert lead1(text) == first


def test_agreement_counts_equal_rows_as_one_whatever_rouge_says() -> None:
    full = [trace("a", (5, 6, 1), "日本"), trace("b", (5, 6, 7, 1), "one two three"), trace("c", (1,), "")]
    early = [trace("a", (5, 6, 1), "日本"), trace("b", (5, 9, 7, 1), "one six three"), trace("c", (1,), "")]
    result = agreement(early, full)
    assert result["equal_rows"] == pytest.approx(2 / 3)
    assert result["rouge_l_to_full"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert result["equal_prefix"] == pytest.approx((3 + 1 + 1) / 8)


def test_agreement_refuses_traces_of_other_rows() -> None:
    with pytest.raises(ValueError, match="other rows or another order"):
        agreement([trace("a", (1,))], [trace("b", (1,))])


def test_depth_counts_every_emitted_token() -> None:
    result = depth_summary([trace("a", (5, 1), layers=(1, 4)), trace("b", (5, 6, 1), layers=(2, 2, 4))], num_layers=4)
    assert result["tokens"] == 5
    assert result["mean_layers"] == pytest.approx(13 / 5)
    assert result["layers_skipped"] == pytest.approx(1 - 13 / 20)
    assert result["mean_backfilled"] == pytest.approx(7 / 5)
    assert result["emission_histogram"] == [1, 2, 0, 2]


def test_depth_refuses_no_tokens_and_impossible_layers() -> None:
    with pytest.raises(ValueError, match="at least one emitted token"):
        depth_summary([trace("a", ())], num_layers=4)
    with pytest.raises(ValueError, match="do not lie in 1..4"):
        depth_summary([trace("a", (1,), layers=(5,))], num_layers=4)
