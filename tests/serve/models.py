"""Tiny models, sources and policies of the engine's tests: random T5s whose depth varies by token and by row."""

from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any

import torch

from calm.config import BatchRule, Measure, RunnerName, Schedule
from calm.cost import CostTable
from calm.decode_batch import BatchDecoder
from calm.models.t5 import EarlyExitT5
from calm.policies import Confident, Full, Policy, Replay, Static
from calm.records import Example
from calm.rules import Rule
from calm.thresholds import ThresholdSchedule
from serve.choice import beside_parked
from serve.engine import Engine
from serve.model import ServedModel, served
from tests.scripted import early_exit, examples, random_t5

VOCABULARY = 97
LENGTH = 10
RUNNER = RunnerName.eager  # of the engines below; the fixture ``each_runner`` changes it
EXACT = (BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.auto)
COUPLED = (BatchRule.sync, BatchRule.quantile, BatchRule.lockstep)
SHAPES: dict[str, dict[str, Any]] = {
    "v1.1": dict(tied=False, gated=True),
    "v1.0-tied": dict(tied=True, gated=False),
    "deeper-decoder": dict(tied=True, gated=True, encoder_layers=1, decoder_layers=6),
}


@cache
def tiny(shape: str = "v1.1", seed: int = 1, dtype: torch.dtype = torch.float32) -> EarlyExitT5:
    """A model that no test changes."""
    return early_exit(random_t5(seed=seed, vocabulary=VOCABULARY, **SHAPES[shape]).to(dtype), length=LENGTH)


@cache
def tiny_served(shape: str = "v1.1", seed: int = 1, dtype: torch.dtype = torch.float32) -> ServedModel:
    return served(tiny(shape, seed, dtype))


class Fickle:
    """Stands for the choice that ``auto`` makes: another row-exact rule for every wave."""

    def __init__(self, parks: bool) -> None:
        self._turn, self._rules = 0, EXACT[:3] if parks else EXACT[:2]

    def rule(self, running: int, parked: bool, measures: Iterable[Measure] = ()) -> Rule:
        self._turn += 1
        return beside_parked(Rule(self._rules[self._turn % len(self._rules)], company=2, max_age=2), parked)

    def saw(self, crossings: Iterable[int], rows: Iterable[Hashable] | None = None) -> None:
        pass


def engine_of(rule: BatchRule, model: ServedModel | None = None, **options: Any) -> Engine:
    """An engine of a tiny model whose slots are poisoned; no time is measured for it."""
    options = {"company": 2, "max_age": 2, "poison": True, "runner": RUNNER, **options}
    engine = Engine(model or tiny_served(), rule=rule, costs=CostTable({}), **options)
    if rule is BatchRule.auto:
        engine.turns.choice = Fickle(parks=not engine.machine.one_piece)  # type: ignore[assignment]
    return engine


@cache
def rows(count: int = 12, seed: int = 6) -> tuple[Example, ...]:
    return tuple(examples(VOCABULARY, count, seed=seed))


def texts(count: int = 12, seed: int = 6) -> list[str]:
    return [row.source for row in rows(count, seed)]


@cache
def confident(
    measure: Measure, threshold: float | tuple[float, ...], kind: Schedule = Schedule.constant, agreement_k: int = 3
) -> Confident:
    return Confident(measure, ThresholdSchedule(threshold, kind=kind, length=LENGTH), agreement_k)


@cache
def usual(measure: Measure, shape: str = "v1.1", seed: int = 1, below: float = 0.5) -> float:
    """A threshold of a measure that the share ``below`` of the checks of a tiny model stays under."""
    if measure is Measure.agreement:
        return 0.5  # it takes few values: a run of two of three
    decoder = BatchDecoder(tiny(shape, seed), record_confidences=True)
    traces = decoder(examples(VOCABULARY, 16, seed=20), confident(measure, 0.999999))
    seen = sorted(c for trace in traces for step in trace.confidences for c in step if c == c)
    return min(seen[int(below * len(seen))], 0.999)


def depths_of(number: int, length: int = LENGTH, layers: int = 4) -> tuple[int, ...]:
    """Recorded depths that vary by row and token."""
    return tuple(1 + (number * 3 + step * (1 + number % 2)) % layers for step in range(length))


@cache
def mixed_policies(layers: int = 4) -> dict[str, Policy]:
    """One of every kind, and every measure; ``replay`` has to be made for a request's id, see ``policy_for``."""
    return {
        "full": Full(),
        "static": Static(2),
        "softmax": confident(Measure.softmax, usual(Measure.softmax)),
        "per-layer": confident(Measure.softmax, (0.5, 0.3, 0.1), Schedule.decaying),
        "decaying": confident(Measure.max_prob, usual(Measure.max_prob), Schedule.decaying_released),
        "state": confident(Measure.state, usual(Measure.state)),
        "classifier": confident(Measure.classifier, usual(Measure.classifier)),
        "entropy": confident(Measure.entropy, usual(Measure.entropy)),
        "agreement-3": confident(Measure.agreement, 0.5),
        "agreement-2": confident(Measure.agreement, 0.9, agreement_k=2),
        "agreement-4": confident(Measure.agreement, 0.7, agreement_k=4),
        "off": confident(Measure.softmax, 1.0),
        "replay": Replay({}),
    }


def policy_for(kind: str, name: str, number: int) -> Policy:
    """The policy of this kind for the request ``name`` whose source is ``number``."""
    return Replay({name: depths_of(number)}) if kind == "replay" else mixed_policies()[kind]
