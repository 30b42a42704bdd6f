"""Ways of decoding that eval.shallow compares: full and static depth, exits, and models of fewer layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calm.config import Consistency, Measure
from calm.engine_config import served_numbers
from calm.errors import ConfigError
from calm.experiment_config import ShallowConfig

from .common import say

if TYPE_CHECKING:
    from calm.calibration import Artifact
    from calm.policies import Policy
    from serve.engine import Engine
    from serve.model import ServedModel

FULL, STATIC, TRAINED, EXIT = "full", "static", "trained shallow", "exit"


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
        role: full, static, trained shallow, exit.
        depth: decoder layers that every token runs; None of an exit.
        threshold: of an exit, at its measure's schedule.
        certified: the threshold is certified for the tolerance asked, as it is decoded here.
        marked: the threshold that calibration chose for the tolerance, certified as decoded here or not.
    """

    name: str
    role: str
    model: "ServedModel"
    policy: "Policy"
    depth: int | None = None
    measure: Measure | None = None
    threshold: float | None = None
    certified: bool = False
    marked: bool = False

    def values(self) -> dict[str, Any]:
        """Columns of its rows."""
        return {
            "way": self.name,
            "role": self.role,
            "depth": self.depth,
            "measure": None if self.measure is None else self.measure.value,
            "threshold": self.threshold,
            "certified": self.certified,
            "marked": self.marked,
        }


def ways(config: ShallowConfig, model: "ServedModel", shallow: Sequence["ServedModel"]) -> list[Way]:
    """Full depth first, then every static depth, the shallow models, exits by measure.

    Raises:
        ConfigError: a shallow model is as deep as the whole one, or two are of one depth.
    """
    from calm.policies import Full, Static

    last = model.spec.num_layers
    found = [Way(FULL, FULL, model, Full(), last)]
    found += [Way(f"static-{depth}", STATIC, model, Static(depth), depth) for depth in range(1, last)]
    for each in sorted(shallow, key=lambda one: one.spec.num_layers):
        depth = each.spec.num_layers
        if depth >= last or any(way.name == f"trained-{depth}" for way in found):
            raise ConfigError(f"shallow: a model of {depth} decoder layers beside one of {last}; give each depth once")
        found.append(Way(f"trained-{depth}", TRAINED, each, Full(), depth))
    for measure in config.measures:
        found += _exits(config, model, measure)
    return found


def _exits(config: ShallowConfig, model: "ServedModel", measure: Measure) -> list[Way]:
    from calm.calibration.artifact import served_as
    from serve.backend import decoding_identity
    from serve.options import EngineOptions

    identity = decoding_identity(model, EngineOptions(weights=served_numbers(config.dtype)[1]))
    there = [a for a in model.artifacts if (a.measure, a.consistency) == (measure, Consistency.risk)]
    there = there if identity is None else served_as(there, identity)
    if not there:
        say(f"{measure.value}: this model has no calibration of it, so it is left out")
        return []
    artifact = there[0]
    exact = identity is not None and not artifact.identity.differences(identity)
    try:
        chosen = artifact.threshold_for(config.tolerance)
    except ConfigError:
        chosen = 1.0
    return [
        Way(
            f"{measure.value}@{threshold:.3g}", EXIT, model, artifact.policy(threshold), None, measure,
            threshold, exact and threshold == chosen, threshold == chosen,
        )
        for threshold in thresholds(artifact, chosen, config.points)
    ]  # fmt: skip


def thresholds(artifact: "Artifact", chosen: Any, points: int) -> list[float]:
    """So many of the grid, spread evenly over its share below 1, and the chosen one, descending; no per-layer ones."""
    below = [each for each in artifact.grid if isinstance(each, float) and each < 1.0]
    kept = {below[round(i * (len(below) - 1) / max(1, points - 1))] for i in range(points)} if below else set()
    if isinstance(chosen, float) and chosen < 1.0:
        kept.add(chosen)
    return sorted(kept, reverse=True)


def engine_of(config: ShallowConfig, way: Way, most: int, waiting: int = 0) -> "Engine":
    """An engine that takes ``most`` rows up before its first step, and so many requests at once."""
    from serve.engine import Engine
    from serve.options import EngineOptions, at_once

    options = EngineOptions(
        rule=config.rule, weights=served_numbers(config.dtype)[1], max_waiting=max(most, waiting), **at_once(most)
    )
    return Engine(way.model, options)
