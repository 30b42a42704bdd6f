"""What an early exit costs: definitions, the equal-token rule, and what is refused."""

import numpy as np
import pytest

from calm.calibration.consistency import ConsistencyLoss, check_losses
from calm.config import Consistency
from calm.errors import CalibrationError
from calm.records import DecodeTrace, Example


def trace(name: str, tokens: tuple[int, ...], text: str) -> DecodeTrace:
    layers = (2,) * len(tokens)
    return DecodeTrace(name, tokens, text, layers, layers, layers, layers)


EXAMPLES = [Example(f"r{i}", f"f{i}", "s", target) for i, target in enumerate(["a fast hash map", "read files", "x"])]
FULL = [trace("r0", (5, 1), "a fast map"), trace("r1", (6, 1), "write it"), trace("r2", (7, 1), "x")]


def test_textual_loss_is_one_minus_rouge_to_full() -> None:
    early = [trace("r0", (5, 9, 1), "a map"), trace("r1", (6, 1), "write it"), trace("r2", (8, 1), "y")]
    losses = ConsistencyLoss(Consistency.textual, EXAMPLES, FULL)(early)
    assert losses == pytest.approx([1 - 0.8, 0.0, 1.0])


def test_risk_loss_is_what_is_lost_to_the_reference_and_never_negative() -> None:
    early = [trace("r0", (9, 1), "hash"), trace("r1", (8, 1), "read files"), trace("r2", (8, 1), "y")]
    losses = ConsistencyLoss(Consistency.risk, EXAMPLES, FULL)(early)
    full_score, early_score = 2 * 3 / 7, 2 * 1 / 5
    assert losses == pytest.approx([full_score - early_score, 0.0, 1.0])


@pytest.mark.parametrize("kind", list(Consistency))
@pytest.mark.parametrize("text", ["", "日本語の要約", "!?", "plain words"])
def test_equal_tokens_cost_exactly_nothing(kind: Consistency, text: str) -> None:
    full = [trace("r0", (5, 1), text)]
    losses = ConsistencyLoss(kind, EXAMPLES[:1], full)([trace("r0", (5, 1), text)])
    assert losses.tolist() == [0.0]


def test_other_tokens_of_a_text_that_rouge_cannot_read_cost_everything() -> None:
    full, early = [trace("r0", (5, 1), "日本")], [trace("r0", (6, 1), "日本")]
    assert ConsistencyLoss(Consistency.textual, EXAMPLES[:1], full)(early).tolist() == [1.0]


def test_clean_is_applied_to_predictions_and_references() -> None:
    full, early = [trace("r2", (5, 1), "<n>x")], [trace("r2", (6, 1), "x<n>")]
    examples = [Example("r2", "f", "s", "x<n>y")]

    def clean(text: str) -> str:
        return text.replace("<n>", " ")

    assert ConsistencyLoss(Consistency.textual, examples, full, clean=clean)(early).tolist() == [0.0]
    risk = ConsistencyLoss(Consistency.risk, examples, full, clean=clean)
    assert risk.full_scores == pytest.approx([2 / 3])


def test_traces_of_other_rows_are_refused_by_id() -> None:
    with pytest.raises(CalibrationError, match="trace 0 is of row 'r1', expected 'r0'"):
        ConsistencyLoss(Consistency.risk, EXAMPLES, [FULL[1], FULL[0], FULL[2]])
    with pytest.raises(CalibrationError, match="2 traces for 3 rows"):
        ConsistencyLoss(Consistency.risk, EXAMPLES, FULL)(FULL[:2])


@pytest.mark.parametrize("bad", [float("nan"), -0.01, 1.01, float("inf")])
def test_a_loss_that_is_none_is_refused_by_row(bad: float) -> None:
    with pytest.raises(CalibrationError, match="loss of row 1 is"):
        check_losses(np.array([0.5, bad]), "test")

    def score(predictions: object, references: object) -> np.ndarray:
        return np.array([1.0, 1.0, bad])

    with pytest.raises(CalibrationError, match="loss of row 2"):
        early = [trace(t.id, (99, 1), "other") for t in FULL]
        ConsistencyLoss(Consistency.textual, EXAMPLES, FULL, score=lambda p, r: 1.0 - score(p, r))(early)
