"""Each measure against its definition, written out; thresholds against the papers' formulas."""

import math

import pytest
import torch

from calm.confidence import CONFIDENCE, LayerView
from calm.config import Measure, Schedule
from calm.thresholds import ThresholdSchedule, measure_schedule

HEAD = torch.randn(11, 6, generator=torch.Generator().manual_seed(0)).double().float()


def view(hidden: torch.Tensor, previous: torch.Tensor | None, before: LayerView | None = None) -> LayerView:
    return LayerView(
        layer=1 if previous is None else 2,
        hidden=hidden,
        previous=previous,
        head=lambda rows: rows @ HEAD.t(),
        classifier=lambda rows: rows.sum(-1).sigmoid(),
        before=before,
    )


def forbidden(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the head was touched")


HIDDEN = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
PREVIOUS = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def test_probability_measures_equal_their_definitions() -> None:
    probabilities = (HIDDEN @ HEAD.t()).softmax(-1)
    top = probabilities.sort(-1, descending=True).values
    spread = -(probabilities * probabilities.log()).sum(-1)
    seen = view(HIDDEN, PREVIOUS)
    torch.testing.assert_close(CONFIDENCE[Measure.softmax](seen), top[:, 0] - top[:, 1])
    torch.testing.assert_close(CONFIDENCE[Measure.max_prob](seen), top[:, 0])
    torch.testing.assert_close(CONFIDENCE[Measure.entropy](seen), 1 - spread / math.log(11))


def test_state_is_the_clamped_cosine_and_silent_at_layer_one() -> None:
    expected = [
        max(0.0, float(a @ b) / (float(a.norm()) * float(b.norm()))) for a, b in zip(HIDDEN, PREVIOUS, strict=True)
    ]
    torch.testing.assert_close(CONFIDENCE[Measure.state](view(HIDDEN, PREVIOUS)), torch.tensor(expected))
    assert min(expected) == 0.0, "a negative cosine is among the rows"
    assert CONFIDENCE[Measure.state](view(HIDDEN, None)).isnan().all()


@pytest.mark.parametrize("measure", [Measure.state, Measure.classifier])
def test_cheap_measures_never_touch_the_head(measure: Measure) -> None:
    seen = view(HIDDEN, PREVIOUS)
    seen.head = forbidden
    assert CONFIDENCE[measure](seen).shape == (5,)


def test_agreement_is_the_run_of_equal_answers() -> None:
    answers = [[4, 4, 4, 4], [4, 5, 5, 4], [1, 1, 2, 2]]  # per row, by layer
    before: LayerView | None = None
    seen = []
    for layer in range(4):
        hidden = torch.zeros(3, 6)
        before = view(hidden, hidden, before)
        before.head = lambda rows, layer=layer: torch.nn.functional.one_hot(  # type: ignore[misc]
            torch.tensor([row[layer] for row in answers]), 11
        ).float()
        seen.append(CONFIDENCE[Measure.agreement](before))
    thirds = torch.stack(seen, dim=1) * 3
    assert thirds.round().int().tolist() == [[1, 2, 3, 3], [1, 1, 2, 1], [1, 2, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("measure", list(Measure))
def test_every_measure_is_fp32_in_the_unit_interval(measure: Measure, dtype: torch.dtype) -> None:
    large = view(HIDDEN.to(dtype) * 300, HIDDEN.to(dtype) * 299)
    large.head = lambda rows: (rows.float() @ HEAD.t()).to(dtype)
    confidence = CONFIDENCE[measure](large)
    assert confidence.dtype is torch.float32
    assert bool(((confidence >= 0) & (confidence <= 1)).all())


def test_decay_follows_equation_5() -> None:
    """lambda'(t) = clip01(0.9 lambda + 0.1 exp(-tau t / N)) against lambda (0.9 + 0.1 exp(-tau t / N)) as released."""
    paper = ThresholdSchedule(0.85, Schedule.decaying, tau=4.0, length=100)
    released = ThresholdSchedule(0.85, Schedule.decaying_released, tau=4.0, length=100)
    assert paper.at(0, 1) == pytest.approx(0.865) and released.at(0, 1) == pytest.approx(0.85)
    for step in (1, 10, 99):
        decay = math.exp(-4.0 * step / 100)
        assert paper.at(step, 1) == pytest.approx(0.9 * 0.85 + 0.1 * decay)
        assert released.at(step, 1) == pytest.approx(0.85 * 0.9 + 0.085 * decay)
    flat = ThresholdSchedule(0.5, Schedule.decaying, tau=0.0, length=100)
    assert flat.at(50, 1) == pytest.approx(0.55)


def test_thresholds_of_one_mean_never() -> None:
    for kind in (Schedule.constant, Schedule.decaying, Schedule.decaying_released):
        schedule = ThresholdSchedule((1.0, 0.5), kind, length=10)
        assert schedule.at(9, 1) == math.inf and schedule.at(9, 2) < 1
        assert not schedule.exits_off and ThresholdSchedule(1.0, kind).exits_off


def test_state_never_decays() -> None:
    assert measure_schedule(Measure.state, Schedule.decaying) is Schedule.constant
    assert measure_schedule(Measure.softmax, Schedule.decaying) is Schedule.decaying
