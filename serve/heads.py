"""Heads: what a check and an emission see of the vocabulary (design.md section 5).

``FullHead`` looks at every word. ``CandidateHead`` looks at every word in a row's first check and only at that check's
best k afterwards. ``ScreenedHead`` looks at int8 copies of the words and rescores the best k exactly.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.config import Head
from calm.layer_math import before_head

from .runner import Runner
from .screen import Screen, quantised

NOTHING = -1  # id of a row whose logits are not finite


@dataclass
class HeadState:
    """What a head remembers of the climbing rows of a wave within one step.

    Attributes:
        candidates: (rows, k) ids of each row's first check, None before it.
        live: (rows,) False for padding; None: there is none.
        asked: (rows, k) ids that the last check looked at; None: every word.
        fallbacks: rows that took the full head because the screen could not decide.
    """

    candidates: Tensor | None = None
    live: Tensor | None = None
    asked: Tensor | None = None
    fallbacks: int = 0

    def alive(self, rows: Bool[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Those of these rows that are none of the padding."""
        return rows if self.live is None else rows & self.live


@runtime_checkable
class Vocabulary(Protocol):
    """A head over a runner's hidden states. A state holds the candidates of the very rows that it comes with."""

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


class CandidateHead:
    """Every word at a row's first check, afterwards only the ``k`` that were best there.

    A row that its confidence lets out emits the best of its k words at the layer where it leaves. Every other row (at
    full or fixed depth, or whose measure needs no head) emits what the full head says.
    """

    def __init__(self, runner: Runner, k: int) -> None:
        self._runner, self._full = runner, FullHead(runner)
        self._k = min(k, runner.spec.vocab_size)

    def check(self, hidden: Float[Tensor, "rows d_model"], state: HeadState) -> Float[Tensor, "rows words"]:
        if state.candidates is not None:
            state.asked = state.candidates
            return self._of(hidden, state.candidates)
        logits = self._full.check(hidden, state)
        state.candidates = logits.topk(self._k, dim=-1).indices
        return logits

    def words(self, positions: Int[Tensor, " rows"], state: HeadState) -> Int[Tensor, " rows"]:
        return positions if state.asked is None else state.asked.gather(1, positions[:, None])[:, 0]

    def emit(
        self, hidden: Float[Tensor, "rows d_model"], early: Bool[Tensor, " rows"], state: HeadState
    ) -> Int[Tensor, " rows"]:
        if state.candidates is None:
            return self._full.emit(hidden, early, state)
        places = best(self._of(hidden, state.candidates))
        words = state.candidates.gather(1, places.clamp(min=0)[:, None])[:, 0]
        tokens = torch.where(places == NOTHING, NOTHING, words)
        if bool(state.alive(~early).any()):  # on the whole bucket: a product's bits depend on its number of rows
            tokens = torch.where(early, tokens, self._full.emit(hidden, early, state))
        return tokens

    def _of(self, hidden: Float[Tensor, "rows d_model"], ids: Int[Tensor, "rows k"]) -> Float[Tensor, "rows k"]:
        spec = self._runner.spec
        normed = before_head(spec, hidden)
        return torch.bmm(spec.tensors["head"][ids], normed[:, :, None])[..., 0].float()


class ScreenedHead:
    """Every word in int8, the ``k`` best of them exactly.

    A check sees exact logits of the k best and the int8 tail. An emission is the full head's argmax: a row for which
    the error bound leaves that open takes the full head.
    """

    def __init__(self, runner: Runner, k: int) -> None:
        self._runner, self._full = runner, FullHead(runner)
        self._screen = Screen(runner.spec.tensors["head"])
        self._k = min(k, runner.spec.vocab_size)

    def check(self, hidden: Float[Tensor, "rows d_model"], state: HeadState) -> Float[Tensor, "rows words"]:
        normed = before_head(self._runner.spec, hidden)
        logits = self._screen.approximate(quantised(normed))
        ids = logits.topk(self._k, dim=-1).indices
        exact = self._screen.exact(normed, ids).to(self._screen.head.dtype)  # as the full head rounds them
        return logits.scatter(1, ids, exact.float())

    def words(self, positions: Int[Tensor, " rows"], state: HeadState) -> Int[Tensor, " rows"]:
        return positions

    def emit(
        self, hidden: Float[Tensor, "rows d_model"], early: Bool[Tensor, " rows"], state: HeadState
    ) -> Int[Tensor, " rows"]:
        normed = before_head(self._runner.spec, hidden)
        rows = quantised(normed)
        # the words that could win are those of the highest bounds, whatever the order of their int8 logits
        highest = self._screen.highest(normed, rows, self._screen.approximate(rows))
        bounds, ids = highest.topk(min(self._k, self._screen.vocab - 1) + 1, dim=-1)
        ids = ids[:, :-1]  # the last one bounds all that are not looked at
        tokens, sure = self._screen.winner(normed, ids, self._screen.exact(normed, ids), bounds[:, -1])
        open_rows = state.alive(~sure)
        count = int(open_rows.sum())
        if count:  # on the whole bucket: a product's bits depend on its number of rows
            state.fallbacks += count
            tokens = torch.where(open_rows, self._full.emit(hidden, early, state), tokens)
        return tokens


def make_head(kind: Head, k: int, runner: Runner) -> Vocabulary:
    """The head of an engine's options."""
    match kind:
        case Head.full:
            return FullHead(runner)
        case Head.candidates:
            return CandidateHead(runner, k)
        case Head.screened:
            return ScreenedHead(runner, k)
