"""This project's engine beside the others: full depth, a static depth, or replayed exits.

Settings: ``dtype`` fp32, bf16 or int8, ``runner``, and ``cross_kv``, which only int8 follows. int8 is of the weights;
what else there is runs in bf16.

A variant is ``{"rule", "head", "policy"}``; a policy is ``{"kind": "full"}``, ``{"kind": "static", "layer"}`` or
``{"kind": "replay", "layers": [[per token], per row], "measure"}``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from calm.config import BatchRule, Head, Measure, RunnerName, Weights
from calm.cost import CostTable
from calm.engine_config import served_numbers
from calm.errors import CalmError
from calm.policies import Full, Policy, Replay, Static, fills_above, fixed_depth
from calm.rules import Rule
from calm.sim_rows import Trace
from calm.simulate import SimEngine
from serve.engine import Engine
from serve.measure import measure, setting_of
from serve.model import ServedModel, served
from serve.options import at_once
from serve.requests import Answer, Status

from .generating import versions
from .protocol import Peer, Sources

PREFILL_ROWS = 8  # of one encoder call at most
ANSWERED = 32  # rows that answer together


def policy_of(told: Mapping[str, Any], names: list[str]) -> Policy:
    """The policy of a variant, for requests of these names."""
    match told["kind"]:
        case "full":
            return Full()
        case "static":
            return Static(told["layer"])
        case _:
            measured = told.get("measure")
            return Replay(dict(zip(names, told["layers"], strict=True)), Measure(measured) if measured else None)


class Ours:
    """Engines of one model in one arithmetic, one for each variant."""

    _model: ServedModel
    _options: dict[str, Any]

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._names: list[str] = []
        self._variants: dict[str, tuple[Engine, Policy]] = {}
        self._costs: dict[tuple[Head, Measure | None], CostTable] = {}

    def load(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(threads)
        dtype, weights = served_numbers(settings["dtype"])
        self._model = served(folder, "cpu", getattr(torch, dtype))
        runner = RunnerName(settings["runner"])
        self._options = {"runner": runner}
        if weights is Weights.int8:
            self._options |= {"weights": weights, "cross_kv": Weights(settings["cross_kv"])}
        return {"versions": versions("torch"), "layers": self._model.spec.num_layers, "runner": runner.value}

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        self._rows = [list(row) for row in sources]
        self._names = [f"row-{number}" for number in range(len(self._rows))]
        self._variants, self._costs = {}, {}
        model = replace(self._model, max_source=max(map(len, self._rows)), max_target=most)
        for name, told in variants.items():
            options = {"rule": BatchRule(told["rule"]), "head": Head(told["head"])}
            engine = self._engine(model, len(self._rows), **options)
            self._variants[name] = engine, policy_of(told["policy"], self._names)

    def _engine(self, model: ServedModel, batch: int, **options: Any) -> Engine:
        """One that takes all rows up before its first step, and encodes them anew each time."""
        return Engine(model, **at_once(batch, PREFILL_ROWS), **self._options, **options)

    def decode(self, variant: str, tokens: int) -> list[int]:
        engine, policy = self._variants[variant]
        answers = engine.generate(self._rows, names=self._names, policy=policy, max_tokens=tokens, ignore_eos=True)
        return [len(answer.tokens) for answer in map(_sound, answers)]

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        engine = self._engine(self._model, min(len(sources), ANSWERED))
        answers = engine.generate([list(row) for row in sources], max_tokens=min(most, self._model.max_target))
        return [list(answer.tokens) for answer in map(_sound, answers)]

    def predict(self, variant: str, tokens: int) -> float:
        """Seconds that the cost table, measured here, gives the rows' tokens from the first one on; no encoder."""
        engine, policy = self._variants[variant]
        asked = policy.measure if isinstance(policy, Replay) else None
        key = engine.options.head, asked
        if key not in self._costs:
            self._costs[key] = measure(engine, measures=[{asked}] if asked else [], lengths=[engine.model.max_source])
        layers = engine.model.spec.num_layers
        wanted = frozenset([asked] if asked else [])
        fills = fills_above(policy)

        def depths(name: str) -> tuple[int, ...]:
            return tuple(fixed_depth(policy, name, step, layers) or layers for step in range(tokens))

        traces = [Trace(depths(name), measures=wanted, fills=fills) for name in self._names]
        simulated = SimEngine(self._costs[key], setting_of(engine), Rule(engine.options.rule))
        simulated.place(traces)
        while simulated.has_work:
            simulated.step()
        return simulated.now


def _sound(answer: Answer) -> Answer:
    """Raise CalmError for one that failed."""
    if answer.status is not Status.finished:
        raise CalmError(f"{answer.id}: {answer.error or answer.status.value}")
    return answer


def make() -> Peer:
    return Ours()
