"""Tiny decoder-only models of the engine's tests, their policies, and what decode_one says."""

from functools import cache
from typing import Any

from calm.config import BatchRule, Measure, Schedule
from calm.cost import CostTable
from calm.layer_schedule import LayerSchedule, Side
from calm.models.causal import CausalModel
from calm.near_ties import Reference, Told
from calm.policies import Full, Policy, Replay, SkipSchedule, Static
from calm.records import Example
from serve.engine import Engine
from serve.model import ServedModel, served
from tests.calm.comparing import confident, usual
from tests.causal import V, early_llama, early_opt, random_llama, random_opt
from tests.scripted import examples

from .models import Fickle, depths_of

LENGTH = 12
LAYERS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(kv_heads=2),
    "llama-one-kv-head": dict(kv_heads=1, tied=True, attention_bias=True, mlp_bias=True),
    "opt": dict(),
    "opt-350m": dict(pre_norm=False, words=12),
}


@cache
def causal(shape: str = "llama", seed: int = 1) -> CausalModel:
    """A model that no test changes."""
    make, wrap = (random_opt, early_opt) if shape.startswith("opt") else (random_llama, early_llama)
    return wrap(make(seed=seed, **SHAPES[shape]))


@cache
def causal_served(shape: str = "llama", seed: int = 1) -> ServedModel:
    return served(causal(shape, seed))


@cache
def rows(count: int = 12, seed: int = 6) -> tuple[Example, ...]:
    return tuple(examples(V, count, seed=seed))


def texts(count: int = 12, seed: int = 6) -> list[str]:
    return [row.source for row in rows(count, seed)]


def causal_engine(rule: BatchRule, model: ServedModel | None = None, **options: Any) -> Engine:
    """An engine of a tiny model whose blocks are poisoned and small; no time is measured for it."""
    options = {"company": 2, "max_age": 2, "poison": True, "block_size": 4, **options}
    engine = Engine(model or causal_served(), rule=rule, costs=CostTable({}), **options)
    if rule is BatchRule.auto:
        engine.turns.choice = Fickle(parks=True)  # type: ignore[assignment]
    return engine


@cache
def mixed(shape: str = "llama") -> dict[str, Policy]:
    """One of every kind, and every measure; ``replay`` has to be made for a request's id, see ``policy_for``."""
    model = causal(shape)
    found: dict[str, Policy] = {measure.value: confident(measure, usual(model, measure)) for measure in Measure}
    decaying = confident(Measure.softmax, usual(model, Measure.softmax), Schedule.decaying)
    off = confident(Measure.softmax, 1.0)
    found |= {"decaying": decaying, "off": off, "full": Full(), "static": Static(2), "replay": Replay({})}
    skipping = {"schedule": LayerSchedule(4, 1, 6), "schedule-bottom": LayerSchedule(4, 1, 5, side=Side.bottom)}
    return found | {name: SkipSchedule(schedule) for name, schedule in skipping.items()}


def policy_for(kind: str, name: str, number: int, shape: str = "llama") -> Policy:
    """The policy of this kind for the request ``name`` whose source is ``number``."""
    return Replay({name: depths_of(number, LENGTH)}) if kind == "replay" else mixed(shape)[kind]


@cache
def told(number: int, kind: str, shape: str = "llama") -> Told:
    """What decode_one says to the source ``number`` of ``rows`` under a policy of ``policy_for``."""
    name = "reference"
    example = Example(name, name, rows()[number].source, "")
    return Reference(causal(shape), record_confidences=True).tell(example, policy_for(kind, name, number, shape))
