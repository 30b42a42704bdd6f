"""When an answer is certified: every condition by itself takes it away."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from calm.calibration.artifact import Artifact, Certificate
from calm.calibration.identity import ModelIdentity
from calm.config import BatchRule, Consistency, Head, Measure, Schedule
from calm.errors import CalibrationError, ConfigError
from calm.policies import Full, Static
from serve.engine import Engine
from serve.model import ServedModel

from .models import COUPLED, EXACT, LENGTH, engine_of, texts, tiny_served

IDENTITY = ModelIdentity(
    model="a" * 64,
    tokenizer="b" * 64,
    dtype="float32",
    exit_layers=(1, 2, 3),
    num_layers=4,
    max_target_tokens=LENGTH,
    max_source_tokens=16,
)


def artifact(measure: Measure = Measure.softmax, picked: bool = True, **changes: Any) -> Artifact:
    """0.9 and 0.5 passed at tolerance 0.1, 0.9 at 0.05, nothing below 1 at 0.01."""
    grid = (1.0, 0.9, 0.5, 0.3)
    certificates = tuple(
        Certificate(tolerance, p_values, certified, certified[-1], 59, picked, {})
        for tolerance, p_values, certified in (
            (0.1, (0.0, 0.0, 0.01, 0.9), grid[:3]),
            (0.05, (0.0, 0.01, 0.5, 0.9), grid[:2]),
            (0.01, (0.0, 0.5, 0.9, 0.9), grid[:1]),
        )
    )
    values: dict[str, Any] = dict(
        measure=measure, consistency=Consistency.risk, schedule=Schedule.decaying, tau=4.0, agreement_k=3, grid=grid,
        error_prob=0.05, test_level=0.05, measures=(measure,), n=500, mean_losses=(0.0, 0.01, 0.02, 0.2),
        layers_skipped=(0.0, 0.1, 0.3, 0.5), article_skips=((0.0, 0.0),) * 4, exit_shares=((0.5, 0.5),) * 4,
        complete=True, certificates=certificates, identity=IDENTITY,
        calibration_rows="c" * 64, dev_rows="d" * 64, metric="rougeL", code_version="0",
    )  # fmt: skip
    made = Artifact(**{**values, **changes})
    made._check("here")
    return made


@cache
def certified_model(dtype: torch.dtype = torch.float32) -> ServedModel:
    identity = replace(IDENTITY, dtype=str(dtype).removeprefix("torch."))
    return replace(tiny_served(dtype=dtype), artifacts=(artifact(),), identity=identity)


def is_certified(engine: Engine, **options: Any) -> bool:
    engine.add_request(texts()[0], **options)
    found = []
    while engine.has_work:
        found += engine.step().answers
    return found[0].certified


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_what_passed_is_certified_by_tolerance_and_by_value(rule: BatchRule) -> None:
    engine = engine_of(rule, certified_model(), max_batch=2)
    assert is_certified(engine, tolerance=0.1)
    assert is_certified(engine, tolerance=0.05)
    assert is_certified(engine, tolerance=0.01)  # full depth
    assert is_certified(engine, threshold=0.5) and is_certified(engine, threshold=0.9)
    assert is_certified(engine, policy=artifact().policy(0.5))
    assert is_certified(engine, tolerance=0.1, max_tokens=LENGTH)
    assert is_certified(engine) and is_certified(engine, policy=Full()) and is_certified(engine, threshold=1.0)


TAKES_IT_AWAY: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"max_tokens": LENGTH - 1},
    {"min_tokens": 1},
    {"stop": ("x",)},
    {"stop_ids": {5}},
    {"ignore_eos": True},
]


@pytest.mark.parametrize("changes", TAKES_IT_AWAY, ids=lambda changes: next(iter(changes)))
def test_whatever_changes_the_tokens_takes_the_certificate_away(changes: dict[str, Any]) -> None:
    engine = engine_of(BatchRule.own, certified_model(), max_batch=2)
    assert not is_certified(engine, tolerance=0.1, **changes)
    assert not is_certified(engine, threshold=0.5, **changes)
    assert is_certified(engine, tolerance=0.1)
    assert is_certified(engine, **changes)  # full depth is full depth


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.4999999, 0.0])
def test_other_thresholds_are_not_certified(threshold: float) -> None:
    """Not even one between two that passed."""
    assert not is_certified(engine_of(BatchRule.own, certified_model(), max_batch=2), threshold=threshold)


def test_another_policy_is_not_certified() -> None:
    engine = engine_of(BatchRule.own, certified_model(), max_batch=2)
    assert not is_certified(engine, policy=Static(3))
    assert not is_certified(engine, policy=artifact(schedule=Schedule.constant).policy(0.5))
    assert not is_certified(engine, policy=artifact(tau=3.0).policy(0.5))
    assert not is_certified(engine, policy=artifact(measure=Measure.entropy).policy(0.5))


@pytest.mark.parametrize("rule", COUPLED, ids=lambda rule: rule.value)
def test_mates_that_decide_take_the_certificate_away(rule: BatchRule) -> None:
    engine = engine_of(rule, certified_model(), max_batch=2)
    assert not is_certified(engine, tolerance=0.1)
    assert is_certified(engine) is (rule is not BatchRule.quantile)  # which may end even a full row early


def test_an_engine_that_decodes_otherwise_is_not_certified() -> None:
    engine = engine_of(BatchRule.own, certified_model(torch.bfloat16), max_batch=2)
    assert not is_certified(engine, threshold=0.5)
    assert is_certified(engine)
    with pytest.raises(CalibrationError, match="tolerance=0.1 cannot be served.*dtype: 'float32' here, 'bfloat16'"):
        engine.add_request(texts()[0], tolerance=0.1)
    for head in (Head.candidates, Head.screened):
        engine = engine_of(BatchRule.own, certified_model(), max_batch=2, head=head)
        assert not is_certified(engine, threshold=0.5)
        with pytest.raises(CalibrationError, match="head: 'full' here"):
            engine.add_request(texts()[0], tolerance=0.1)


def test_in_bf16_only_full_depth_is_certified() -> None:
    """An answer may depend on the size of its batch there, and the artifact does not say at which it was made."""
    own = replace(IDENTITY, dtype="bfloat16")
    model = replace(certified_model(torch.bfloat16), artifacts=(artifact(identity=own),), identity=own)
    engine = engine_of(BatchRule.own, model, max_batch=2)
    assert not is_certified(engine, tolerance=0.1) and is_certified(engine)


def test_another_number_of_candidates_is_another_head() -> None:
    own = replace(IDENTITY, head="candidates", head_k=8)
    model = replace(certified_model(), artifacts=(artifact(identity=own),))
    assert is_certified(engine_of(BatchRule.own, model, head=Head.candidates, head_k=8), tolerance=0.1)
    other = engine_of(BatchRule.own, model, head=Head.candidates, head_k=4)
    assert not is_certified(other, threshold=0.5)
    with pytest.raises(CalibrationError, match="head_k: 8 here, 4 asked"):
        other.add_request(texts()[0], tolerance=0.1)


@pytest.mark.parametrize(
    "changes", [{"model": "e" * 64}, {"tokenizer": "e" * 64}, {"exit_layers": (2,)}, {"backfill": "copy"}]
)
def test_anothers_certificate_does_not_count(changes: dict[str, Any]) -> None:
    model = replace(certified_model(), identity=replace(IDENTITY, **changes))
    engine = engine_of(BatchRule.own, model, max_batch=2)
    assert not is_certified(engine, threshold=0.5)


def test_what_was_not_tested_is_refused_by_name() -> None:
    engine = engine_of(BatchRule.own, certified_model(), max_batch=2)
    with pytest.raises(CalibrationError, match="not tested at tolerance 0.2, only at 0.1, 0.05, 0.01"):
        engine.add_request(texts()[0], tolerance=0.2)
    with pytest.raises(CalibrationError, match="no calibration state-risk; it has softmax-risk"):
        engine.add_request(texts()[0], tolerance=0.1, measure="state")
    with pytest.raises(CalibrationError, match="no calibration textual"):
        engine.add_request(texts()[0], tolerance=0.1, consistency=Consistency.textual)
    with pytest.raises(ConfigError, match="measure='depth' is none"):
        engine.add_request(texts()[0], tolerance=0.1, measure="depth")
    with pytest.raises(CalibrationError, match="it has none"):
        engine_of(BatchRule.own).add_request(texts()[0], tolerance=0.1)


def test_of_several_measures_the_picked_one_answers() -> None:
    both = (artifact(Measure.entropy, picked=False), artifact(Measure.softmax))
    engine = engine_of(BatchRule.own, replace(certified_model(), artifacts=both), max_batch=2)
    policies = {}
    for name, options in {"picked": {}, "asked": {"measure": "entropy"}}.items():
        engine.add_request(texts()[0], tolerance=0.1, name=name, **options)
        policies[name] = engine._rows[name].policy
    assert policies == {"picked": both[1].policy(0.5), "asked": both[0].policy(0.5)}


def test_answers_that_did_not_finish_are_not_certified() -> None:
    engine = engine_of(BatchRule.own, certified_model(), max_batch=2)
    engine.add_request(texts()[0], tolerance=0.1, name="a")
    engine.step()
    engine.abort("a")
    assert [answer.certified for answer in engine.step().answers] == [False]


def test_tolerances_are_those_that_get_a_certified_answer() -> None:
    def tolerances(rule: BatchRule, model: ServedModel, **options: Any) -> dict[str, tuple[float, ...]]:
        return engine_of(rule, model, max_batch=2, **options).certificates.tolerances(LENGTH)

    model = certified_model()
    assert tolerances(BatchRule.compact, model) == {"risk": (0.01, 0.05, 0.1)}
    assert tolerances(BatchRule.sync, model) == {"risk": (0.01,)}  # there full depth is all that passed
    assert tolerances(BatchRule.quantile, model) == {}
    assert tolerances(BatchRule.own, model, head=Head.candidates) == {}  # it belongs to another way of decoding
    both = (artifact(), artifact(Measure.state, picked=False, consistency=Consistency.textual))
    assert tolerances(BatchRule.own, replace(model, artifacts=both)) == {
        "risk": (0.01, 0.05, 0.1),
        "textual": (0.01, 0.05, 0.1),
    }
    assert engine_of(BatchRule.own, model, max_batch=2).certificates.tolerances(LENGTH - 1) == {"risk": (0.01,)}


def test_the_picked_artifact_is_that_of_the_first_consistency() -> None:
    textual = artifact(Measure.state, consistency=Consistency.textual)
    others = (artifact(Measure.entropy, picked=False), artifact())
    picks = [
        engine_of(BatchRule.own, replace(certified_model(), artifacts=artifacts), max_batch=2).certificates.picked
        for artifacts in ((), (textual,), (textual, *others))
    ]
    assert picks == [None, textual, others[1]]
