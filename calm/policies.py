"""Policies: when a row may leave, or which layers it runs.

A policy knows neither model nor cache. The decoders ask it two things: a fixed depth for a row and step, if it
has one, and whether a confidence crosses. The oracle is a decoder's matter: it needs the full stack's answer. A
schedule is asked for a set of layers instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import Measure
from .errors import ConfigError
from .kv_budget import ErrorTable
from .layer_schedule import LayerSchedule, check_monotone
from .thresholds import ThresholdSchedule


@dataclass(frozen=True, slots=True)
class Full:
    """Every layer for every token."""


@dataclass(frozen=True, slots=True)
class Static:
    """The same ``layer`` for every token (1..L): a model cut there."""

    layer: int


@dataclass(frozen=True, slots=True)
class Confident:
    """Leave after the first checked layer whose confidence reaches the threshold (CALM section 3.3)."""

    measure: Measure
    schedule: ThresholdSchedule
    agreement_k: int = 3


@dataclass(frozen=True, slots=True)
class Budgeted:
    """``exits`` until the expected errors of the keys and values they left add up to ``budget``; then a step at full
    depth, after which, as after any other step at full depth, the sum begins anew.

    Such a step repairs nothing that is written: it reads what is there, and says its word from layer L.
    """

    exits: Confident
    budget: float
    errors: ErrorTable

    def __post_init__(self) -> None:
        if not self.budget >= 0.0:
            raise ConfigError(f"budget must lie in [0, inf], got {self.budget}")

    def is_spent(self, spent: float) -> bool:
        """Whether the next step runs every layer."""
        return spent >= self.budget

    def spend(self, spent: float, crossing: int, num_layers: int, cosine: float) -> float:
        """What is spent after a step that was left at ``crossing`` with this cosine to the layer below."""
        return 0.0 if crossing == num_layers else spent + self.errors.expected(num_layers - crossing, cosine)


@dataclass(frozen=True, slots=True)
class Oracle:
    """First layer whose argmax equals that of the full stack over the row's own early-exit cache (CALM section 3.2)."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Leave where recorded layers say: ``layers[example id][step]``; full depth beyond the recording.

    With a ``measure`` the engine computes it at every checked layer and discards its answer, so that a replay costs
    what the measure would have cost.
    """

    layers: Mapping[str, Sequence[int]]
    measure: Measure | None = None
    agreement_k: int = 3


@dataclass(frozen=True, slots=True)
class SkipSchedule:
    """At each position exactly the layers that a schedule names, nothing backfilled (SkipDecode, 2307.02628).

    What a trace then holds: ``crossing_layers`` and ``emission_layers`` the highest layer that ran (L; with side
    ``bottom`` their number), ``executed_layers`` how many ran, ``backfilled_layers`` 0.
    """

    schedule: LayerSchedule


Policy = Full | Static | Confident | Budgeted | Oracle | Replay | SkipSchedule


def fills_above(policy: Policy) -> bool:
    """Whether a later token may read keys and values above the layers that an earlier one ran.

    Not where all tokens have one depth, nor under a schedule, whose layers only become fewer.
    """
    return not isinstance(policy, Static | SkipSchedule)


def exits_of(policy: Policy) -> Policy:
    """What lets tokens leave: of a budget its exits, else the policy itself."""
    return policy.exits if isinstance(policy, Budgeted) else policy


def fixed_depth(policy: Policy, example_id: str, step: int, num_layers: int) -> int | None:
    """The depth that the policy fixes for this row and step; None where confidences decide.

    Raises:
        ConfigError: the depth lies outside 1..L, or the policy runs a set of layers, which is no depth, or goes by
            what a row has spent.
    """
    match policy:
        case Full():
            return num_layers
        case Static(layer):
            depth = layer
        case Replay(layers):
            recorded = layers.get(example_id, ())
            depth = recorded[step] if step < len(recorded) else num_layers
        case Confident(schedule=schedule):
            return num_layers if schedule.exits_off else None
        case Oracle():
            return None
        case SkipSchedule():
            raise ConfigError("policy 'skip_schedule' runs a set of layers at each position, which is no depth")
        case Budgeted():
            raise ConfigError(
                "policy 'budgeted' is decoded by calm alone, not by the engine; give decoder=batch or decoder=one"
            )
    if not 1 <= depth <= num_layers:
        raise ConfigError(f"depth {depth} lies outside 1..{num_layers}: the model has {num_layers} decoder layers")
    return depth


def scheduled_layers(policy: SkipSchedule, step: int, num_layers: int) -> tuple[int, ...]:
    """Layers (1..L, ascending) of a step, each of which every earlier step has run.

    Raises:
        ConfigError: the schedule exceeds the depth, or a layer's K and V would be missing at the step before.
    """
    layers = policy.schedule.layers(step, num_layers)
    if step:
        check_monotone([policy.schedule.layers(step - 1, num_layers), layers])
    return layers
