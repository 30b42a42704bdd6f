"""Whether early exit is worth training or certifying for a model, by rule, from what eval.suitability measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .exit_bytes import SOFTMAX, STATE, of_checks

# A bound is not what arrives: for debian_tiny at batch 8 the oracle's is 2.09, that of the certified thresholds of
# `state` 1.47, and 1.31 was measured (results/debian_tiny, results/engine_debian): .28 of the gain. So 1.25 leaves some
# 1.07, and anything less is lost in what differs between two repeats.
WORTH = 1.25
# An answer that never ends mostly repeats itself, and repeated words settle early: the layers of a model that does not
# know its task yet say nothing of those that it will have.
ENDED = 0.5


class Says(str, Enum):
    """What the rule found."""

    worth = "worth"
    no = "not"
    undecided = "undecided"


@dataclass(frozen=True)
class Verdict:
    """``because`` is one line for people."""

    says: Says
    because: str


@dataclass(frozen=True)
class Evidence:
    """What the rule looks at.

    Attributes:
        ours: the folder has ``early_exit.json``; the exits of a plain T5 are not trained, and training moves them down
            (in results/debian_price the oracle of the untrained ones runs 3.16 layers of 8, of the trained ones 1.78).
        first, settled: mean layer at which a token first says the last layer's word, and from which on all do.
        head_share: of the bytes of a step at full depth, by batch.
        ended: share of the answers that end by themselves.
        bounds: as ``eval.exit_bytes.bounds`` gives them.
    """

    num_layers: int
    ours: bool
    first: float
    settled: float
    head_share: Mapping[int, float]
    ended: float
    bounds: Sequence[Mapping[str, Any]]


def verdict(found: Evidence) -> Verdict:
    """Worth it where the interval of a bound by bytes, without reading the vocabulary, lies above ``WORTH``.

    Not, where no exit at all could reach that (``most``), or where every interval lies below. Undecided, where most
    answers do not end, and where an interval holds ``WORTH``.
    """
    free = of_checks(found.bounds, STATE)
    low, high = ({batch: row[f"bound_{end}"] for batch, row in free.items()} for end in ("low", "high"))
    if max(row["most"] for row in free.values()) < WORTH:
        says, because = Says.no, _too_little_to_skip(found, free)
    elif found.ended < ENDED:
        says, because = Says.undecided, _circles(found, free)
    elif max(low.values()) >= WORTH:
        says, because = Says.worth, _worth(found, free)
    elif max(high.values()) < WORTH:
        says, because = Says.no, _late(found, free)
    else:
        batch = max(high, key=lambda each: high[each])
        says = Says.undecided
        because = (
            f"undecided: at batch {batch} the bound by bytes lies between {low[batch]:.2f} and {high[batch]:.2f}, and "
            f"{WORTH:g} is asked for; measure more articles (n=)"
        )
    return Verdict(says, because)


def _too_little_to_skip(found: Evidence, free: Mapping[int, Mapping[str, Any]]) -> str:
    batch = max(free, key=lambda each: free[each]["most"])
    return (
        f"not for this model: the head alone is {100 * found.head_share[batch]:.0f} % of a step; even if every token "
        f"left at layer 1, bytes would bound the speed-up to {free[batch]['most']:.2f} at batch {batch}"
    )


def _circles(found: Evidence, free: Mapping[int, Mapping[str, Any]]) -> str:
    batch = max(free, key=lambda each: free[each]["most"])
    return (
        f"undecided: only {100 * found.ended:.0f} % of the answers end, the others go round in circles; train the "
        f"model for this corpus first (bytes bound the speed-up to {free[batch]['most']:.2f} at batch {batch} if every "
        "token left at layer 1)"
    )


def _worth(found: Evidence, free: Mapping[int, Mapping[str, Any]]) -> str:
    good = [batch for batch in free if free[batch]["bound_low"] >= WORTH]
    reading = of_checks(found.bounds, SOFTMAX)[good[0]]["bound"]
    skipped = 100 * (1 - found.first / found.num_layers)
    said = (
        f"an oracle would skip {skipped:.0f} % of the layers; by bytes at batch {good[0]} that bounds the speed-up to "
        f"{free[good[0]]['bound']:.2f} with checks that read no vocabulary and to {reading:.2f} with checks that do"
    )
    for batch in free:
        if batch not in good:
            said += f"; at batch {batch} it is {free[batch]['bound']:.2f}, not surely {WORTH:g}"
    return f"{said}; {'worth certifying thresholds' if found.ours else 'worth training exits'}"


def _late(found: Evidence, free: Mapping[int, Mapping[str, Any]]) -> str:
    batch = max(free, key=lambda each: free[each]["bound"])
    depth = (
        f"tokens settle at layer {found.settled:.1f} of {found.num_layers} (first there at {found.first:.1f}); by "
        f"bytes that bounds the speed-up to {free[batch]['bound']:.2f} at batch {batch}"
    )
    if found.ours:
        return f"not for this model: {depth}"
    return (
        f"not for this model as it is: {depth}; training exits moves that, to {free[batch]['most']:.2f} if every token "
        "left at layer 1"
    )
