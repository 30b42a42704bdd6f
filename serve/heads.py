"""Heads: what a check and an emission see of the vocabulary (design.md section 5).

``FullHead`` looks at every word. ``CandidateHead`` looks at every word in a row's first check and only at that check's
best k afterwards. ``ScreenedHead`` looks at int8 copies of the words and rescores the best k exactly.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.config import Head

from .runner import Runner

NOTHING = -1  # id of a row whose logits are not finite


@dataclass
class HeadState:
    """What a head remembers of the climbing rows of a wave within one step.

    Attributes:
        candidates: (rows, k) ids of each row's first check, None before it.
        fallbacks: rows that took the full head because the screen could not decide.
    """

    candidates: Tensor | None = None
    fallbacks: int = 0

    def select(self, index: Int[Tensor, " kept"]) -> "HeadState":
        return HeadState(None if self.candidates is None else self.candidates[index], self.fallbacks)


class Vocabulary(Protocol):
    """A head over a runner's hidden states. All calls of a step get the same state, row for row."""

    def check(self, hidden: Float[Tensor, "rows d_model"], state: HeadState) -> Float[Tensor, "rows words"]:
        """fp32 logits that a measure reads; of fewer words than the vocabulary where the head says so."""
        ...

    def words(self, positions: Int[Tensor, " rows"], state: HeadState) -> Int[Tensor, " rows"]:
        """Ids of the words at these positions of the last ``check``."""
        ...

    def emit(
        self, hidden: Float[Tensor, "rows d_model"], early: Bool[Tensor, " rows"], state: HeadState
    ) -> Int[Tensor, " rows"]:
        """Greedy ids, ``NOTHING`` where a row has no number. ``early``: its confidence let it out below layer L."""
        ...


def best(logits: Float[Tensor, "rows words"]) -> Int[Tensor, " rows"]:
    """Argmax of each row; ``NOTHING`` where its largest logit is NaN or infinite."""
    values, ids = logits.max(dim=-1)
    return torch.where(values.isfinite(), ids, NOTHING)


class FullHead:
    """Every word at every check."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def check(self, hidden: Float[Tensor, "rows d_model"], state: HeadState) -> Float[Tensor, "rows words"]:
        return self._runner.logits(hidden).float()

    def words(self, positions: Int[Tensor, " rows"], state: HeadState) -> Int[Tensor, " rows"]:
        return positions

    def emit(
        self, hidden: Float[Tensor, "rows d_model"], early: Bool[Tensor, " rows"], state: HeadState
    ) -> Int[Tensor, " rows"]:
        return best(self._runner.logits(hidden).float())


def make_head(kind: Head, k: int, runner: Runner) -> Vocabulary:
    """The head of an engine's options."""
    return FullHead(runner)
