"""Ways of decoding that eval.shallow compares: full and static depth, exits, and models of fewer layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, Consistency, Measure
from calm.engine_config import served_numbers
from calm.errors import CalibrationError, ConfigError

from .common import say

if TYPE_CHECKING:
    from calm.calibration import Artifact
    from calm.experiment_config import ShallowConfig
    from calm.policies import Policy
    from serve.engine import Engine
    from serve.model import ServedModel
    from serve.options import EngineOptions

FULL, STATIC, TRAINED, EXIT = "full", "static", "trained", "exit"


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
        role: full, static, trained (a model of its own, at its full depth), exit.
        depth: decoder layers that every token runs; None of an exit.
        threshold: of an exit, at its measure's schedule.
        tolerance: that the threshold is certified for, as it is decoded here; None: it is not.
        marked: the threshold that calibration chose for the tolerance asked, certified as decoded here or not.
    """

    name: str
    role: str
    model: "ServedModel" = field(repr=False)
    policy: "Policy" = field(repr=False)
    depth: int | None = None
    measure: Measure | None = None
    threshold: float | list[float] | None = None
    tolerance: float | None = None
    marked: bool = False

    def values(self) -> dict[str, Any]:
        """Columns of its rows."""
        return {
            "role": self.role,
            "depth": self.depth,
            "measure": None if self.measure is None else self.measure.value,
            "threshold": self.threshold,
            "tolerance": self.tolerance,
            "marked": self.marked,
        }


def ways(config: "ShallowConfig", dtype: str, model: "ServedModel", others: Sequence["ServedModel"]) -> list[Way]:
    """Full depth first, then every static depth, the other models, exits by measure.

    Raises:
        ConfigError: another model is deeper than the first, or two are of one depth.
    """
    from calm.policies import Full, Static

    last = model.spec.num_layers
    found = [Way(FULL, FULL, model, Full(), last)]
    found += [Way(f"static {depth}", STATIC, model, Static(depth), depth) for depth in range(1, last)]
    for each in sorted(others, key=lambda one: one.spec.num_layers):
        depth = each.spec.num_layers
        if depth > last or any(way.name == f"trained {depth}" for way in found):
            raise ConfigError(f"shallow: a model of {depth} decoder layers beside one of {last}; give each depth once")
        found.append(Way(f"trained {depth}", TRAINED, each, Full(), depth))
    for measure in config.measures:
        found += exits(model, measure, dtype, config.tolerance, config.points)
    return found


def artifact_of(model: "ServedModel", measure: Measure, dtype: str) -> "tuple[Artifact, bool] | None":
    """The calibration of a measure that stands for how it is decoded, and whether it was made so; None: there is none.

    Of several that were made otherwise (other numbers, a thinner head) the full head's fp32 one comes first.
    """
    from calm.calibration.artifact import served_as
    from serve.backend import decoding_identity

    there = [each for each in model.artifacts if (each.measure, each.consistency) == (measure, Consistency.risk)]
    identity = decoding_identity(model, options_of(BatchRule.own, dtype, 1, 1))
    there = there if identity is None else served_as(there, identity)
    if not there:
        return None
    plain = [each for each in there if each.identity.head == "full"]
    best = (plain or there)[0]
    return best, identity is not None and not best.identity.differences(identity)


def exits(model: "ServedModel", measure: Measure, dtype: str, tolerance: float, points: int) -> list[Way]:
    """At the threshold certified for a tolerance and ``points`` others; says why where there is none."""
    from calm.calibration.grid import point_to_json

    found = artifact_of(model, measure, dtype)
    if found is None:
        say(f"{measure.value}: this model has no calibration of it, so it is left out")
        return []
    artifact, exact = found
    try:
        certificate = artifact.certificate(tolerance)
        chosen = certificate.threshold if certificate.certified_below_one else None
    except CalibrationError as error:
        say(f"{measure.value}: {error}")
        chosen = None
    return [
        Way(
            f"{measure.value} {place}", EXIT, model, artifact.policy(point), None, measure,
            point_to_json(point), tolerance if exact and point == chosen else None, point == chosen,
        )
        for place, point in thresholds(artifact, chosen, points).items()
    ]  # fmt: skip


def thresholds(artifact: "Artifact", chosen: Any, points: int) -> dict[int, Any]:
    """So many of the grid, spread evenly over what lets a token leave, and the chosen one, by their place in it."""
    below = [place for place, point in enumerate(artifact.grid) if any(each < 1.0 for each in _listed(point))]
    kept = {below[round(i * (len(below) - 1) / max(1, points - 1))] for i in range(points)} if below else set[int]()
    return {place: artifact.grid[place] for place in below if place in kept or artifact.grid[place] == chosen}


def _listed(point: Any) -> list[float]:
    """A threshold's values: one, or one a layer."""
    return [point] if isinstance(point, float | int) else list(point)


def options_of(rule: BatchRule, dtype: str, most: int, waiting: int) -> "EngineOptions":
    """Of an engine that takes ``most`` rows up before its first step, and so many requests at once."""
    from serve.options import EngineOptions, at_once

    weights = served_numbers(dtype)[1]
    return EngineOptions(rule=rule, weights=weights, max_waiting=max(most, waiting), **at_once(most))


def engine_of(model: "ServedModel", rule: BatchRule, dtype: str, most: int, waiting: int) -> "Engine":
    from serve.engine import Engine

    return Engine(model, options_of(rule, dtype, most, waiting))


def opened(folder: Path, dtype: str) -> "ServedModel":
    """A model folder as it is served in one of SERVED_DTYPES."""
    from serve.model import served

    from .workload import model_dtype

    return served(folder, dtype=model_dtype(dtype))
