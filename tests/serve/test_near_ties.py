"""The judge of the other tests: it excuses a near-tie, and nothing else."""

from dataclasses import replace

import pytest

from calm.config import BatchRule, Measure
from calm.near_ties import Reference, Told
from calm.policies import Full, Policy
from serve.requests import Answer

from .models import confident, engine_of, rows, tiny, usual
from .near_ties import Tally

pytestmark = pytest.mark.usefixtures("each_runner")

POLICY = confident(Measure.softmax, usual(Measure.softmax))


@pytest.fixture(scope="module")
def known() -> tuple[Answer, Told]:
    told = Reference(tiny(), record_confidences=True).tell(rows()[0], POLICY)
    answer = engine_of(BatchRule.own).generate([rows()[0].source], policy=POLICY)[0]
    return answer, told


def wrong_at(answer: Answer, step: int) -> Answer:
    tokens = list(answer.tokens)
    tokens[step] += 1
    return replace(answer, tokens=tuple(tokens))


def with_gap(told: Told, step: int, gap: float) -> Told:
    gaps = [*told.gaps[:step], (*told.gaps[step][:-1], gap), *told.gaps[step + 1 :]]
    return replace(told, gaps=tuple(gaps))


def with_confidence(told: Told, step: int, value: float, policy: Policy) -> Told:
    confidences = list(told.trace.confidences)
    confidences[step] = (value, *confidences[step][1:])
    return replace(told, trace=replace(told.trace, confidences=tuple(confidences)), policy=policy)


def test_equal_rows_are_no_ties(known: tuple[Answer, Told]) -> None:
    answer, told = known
    tally = Tally()
    tally.compare(answer, told)
    tally.compare(replace(answer, tokens=answer.tokens[:3], crossing_layers=answer.crossing_layers[:3]), told, limit=3)
    assert (tally.rows, tally.ties) == (2, 0)
    assert all(len(looks) == min(layer, 3) + 1 for looks, layer in zip(told.gaps, answer.crossing_layers, strict=True))


def test_another_token_or_layer_or_length_is_no_excuse(known: tuple[Answer, Told]) -> None:
    answer, told = known
    layers = (answer.crossing_layers[0] % 4 + 1, *answer.crossing_layers[1:])
    for other in (
        wrong_at(answer, 4),
        replace(answer, crossing_layers=layers),
        replace(answer, tokens=answer.tokens[:-1], crossing_layers=answer.crossing_layers[:-1]),
    ):
        with pytest.raises(AssertionError, match="differs at token"):
            Tally().compare(other, told)


def test_close_logits_excuse_the_first_difference_only(known: tuple[Answer, Told]) -> None:
    answer, told = known
    tally = Tally()
    tally.compare(wrong_at(answer, 4), with_gap(told, 4, 1e-6))
    assert tally.ties == 1
    for step, gap in ((5, 1e-6), (3, 1e-6), (4, 1e-4)):
        with pytest.raises(AssertionError, match="differs at token 4"):
            Tally().compare(wrong_at(answer, 4), with_gap(told, step, gap))


def test_a_confidence_at_its_threshold_excuses(known: tuple[Answer, Told]) -> None:
    answer, told = known
    threshold = POLICY.schedule.at(4, 1)
    tally = Tally()
    tally.compare(wrong_at(answer, 4), with_confidence(told, 4, threshold * (1 + 5e-6), POLICY))
    assert tally.ties == 1
    for value, policy in ((threshold * (1 + 5e-5), POLICY), (threshold, Full()), (float("nan"), POLICY)):
        with pytest.raises(AssertionError):
            Tally().compare(wrong_at(answer, 4), with_confidence(told, 4, value, policy))


def test_ties_are_counted_and_rare_and_depths_vary(capsys: pytest.CaptureFixture[str]) -> None:
    Tally(rows=1000, ties=4, depths={1, 2, 3}).check()
    assert "4 near-ties in 1000 rows" in capsys.readouterr().out
    for bad in (Tally(1000, 5, {1, 2, 3}), Tally(100, 1, {1, 2, 3}), Tally(1000, 0, {1, 4})):
        with pytest.raises(AssertionError):
            bad.check()
