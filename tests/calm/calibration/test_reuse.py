"""A row is kept only when a decode would give it again, and is decoded otherwise."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.calibration.reuse import changed_rows
from calm.config import Measure, Schedule
from calm.policies import Confident
from calm.records import DecodeTrace
from calm.thresholds import ThresholdSchedule

from .fake_decoder import IDENTITY, LAYERS, LENGTH, FakeDecoder, make_examples

NAN = math.nan


def trace(crossing: int, *confidences: float) -> DecodeTrace:
    return DecodeTrace("r", (5,), "", (crossing,), (crossing,), (crossing,), (4 - crossing,), (confidences,))


def unchanged(row: DecodeTrace, threshold: float | tuple[float, ...], exit_layers: tuple[int, ...] = (1, 2, 3)) -> bool:
    return changed_rows([row], ThresholdSchedule(threshold), exit_layers, num_layers=4) == []


def test_a_row_is_kept_while_no_layer_below_its_crossing_reaches_the_threshold() -> None:
    crossed = trace(3, 0.2, 0.5, 0.8, NAN)
    assert unchanged(crossed, 0.7)
    assert unchanged(crossed, 0.6)
    assert not unchanged(crossed, 0.4)  # layer 2 crosses now
    assert not unchanged(crossed, 0.1)


def test_a_row_that_never_crossed_follows_the_same_rule() -> None:
    full = trace(4, 0.2, 0.5, 0.8, NAN)
    assert unchanged(full, 0.9)
    assert not unchanged(full, 0.7)


def test_layers_that_are_not_checked_or_say_nothing_do_not_count() -> None:
    assert unchanged(trace(3, NAN, 0.1, 0.8, NAN), 0.5)
    assert unchanged(trace(3, 0.9, 0.1, 0.8, NAN), 0.5, exit_layers=(2, 3))


def test_thresholds_per_layer() -> None:
    row = trace(3, 0.4, 0.5, 0.8, NAN)
    assert unchanged(row, (1.0, 0.6, 0.7))
    assert not unchanged(row, (0.3, 0.6, 0.7))
    assert not unchanged(row, (1.0, 0.45, 0.7))
    assert unchanged(trace(4, 1.0, 0.1, 0.1, NAN), (1.0, 0.5, 0.5))  # 1.0 turns a layer off, saturated or not


def test_unsure_means_decode_again() -> None:
    assert not unchanged(trace(4, NAN, NAN, NAN, NAN), 0.1)  # of a decode that asked no measure
    assert not unchanged(trace(3, 0.2, 0.5, 0.8, NAN), 0.5 + 5e-7)  # too close to call
    assert not unchanged(trace(3, 0.2, 0.5, 0.8, NAN), 0.85)  # would climb on, unseen
    assert not unchanged(DecodeTrace("r", (5,), "", (3,), (3,), (3,), (1,)), 0.1)  # nothing was recorded
    assert unchanged(DecodeTrace("r", (), "", (), (), (), ()), 0.1)


def test_a_decaying_threshold_is_compared_step_by_step() -> None:
    row = DecodeTrace("r", (5, 6), "", (4, 4), (4, 4), (4, 4), (0, 0), ((0.0, 0.9, 0.9, NAN),) * 2)
    constant = ThresholdSchedule(0.95)
    decaying = ThresholdSchedule(0.95, Schedule.decaying, tau=4.0, length=2)
    assert decaying.at(0, 1) > 0.9 > decaying.at(1, 1)
    assert changed_rows([row], constant, (1, 2, 3), 4) == []
    assert changed_rows([row, row], decaying, (1, 2, 3), 4) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([Measure.softmax, Measure.state, Measure.classifier]),
    st.sampled_from([Schedule.constant, Schedule.decaying, Schedule.decaying_released]),
)
def test_kept_rows_equal_a_fresh_decode(first: float, second: float, measure: Measure, kind: Schedule) -> None:
    examples = make_examples(8, "reuse")
    decode = FakeDecoder()

    def policy(threshold: float) -> Confident:
        return Confident(measure, ThresholdSchedule(threshold, kind, 4.0, LENGTH))

    before = decode(examples, policy(max(first, second)))
    after = decode(examples, policy(min(first, second)))
    changed = changed_rows(before, policy(min(first, second)).schedule, IDENTITY.exit_layers, LAYERS)
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if row not in changed:
            assert repr(old) == repr(new)  # repr: NaN equals itself there


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.state])
def test_a_small_step_keeps_many_rows_and_a_large_one_changes_all(measure: Measure) -> None:
    examples = make_examples(60, "steps")
    decode = FakeDecoder()
    full = decode(examples, Confident(measure, ThresholdSchedule(1.0)))
    assert len(changed_rows(full, ThresholdSchedule(0.999), IDENTITY.exit_layers, LAYERS)) < 60
    assert len(changed_rows(full, ThresholdSchedule(0.0), IDENTITY.exit_layers, LAYERS)) == 60
