"""Answers that are not what they were decoded as elsewhere, and whether rounding alone explains it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calm.config import BatchRule

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example


def parting(mine: "Sequence[DecodeTrace]", theirs: "Sequence[DecodeTrace]") -> dict[int, int]:
    """By number of the answer, the first position where tokens or crossing layers differ; of those that do."""
    from calm.near_ties import parts_at

    pairs = [[(t.tokens, t.crossing_layers) for t in both] for both in zip(mine, theirs, strict=True)]
    found = {number: parts_at(*pair) for number, pair in enumerate(pairs)}
    return {number: step for number, step in found.items() if step is not None}


def near_ties(
    model: "SpeakingModel", examples: "Sequence[Example]", policy: "Policy", changed: Mapping[int, int]
) -> int:
    """How many of these answers nearly differed in decode_one too, where they part.

    Args:
        model: in fp32; in coarser numbers a near tie says nothing.
        changed: number of the answer -> position, as ``parting`` gives it.
    """
    from calm.near_ties import Reference

    tell = Reference(model, record_confidences=True).tell
    return sum(tell(examples[number], policy).nearly(step) for number, step in changed.items())


def is_row_exact(rule: BatchRule) -> bool:
    """Where a rule lets mates decide, a difference needs no excuse."""
    from calm.rules import ROW_EXACT

    return rule in ROW_EXACT
