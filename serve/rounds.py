"""Rounds of rows that draft (calm.drafting): their answers are those of full depth, several tokens at a time.

A round asks a runner for the same layers as a step does: first the drafting ones position by position, then the others
with every position of every row as a row of one batch. Rows may draft more or less than their mates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from calm.confidence import CONFIDENCE, LayerView
from calm.drafting import Draft

from .heads import NOTHING, best
from .lanes import Lanes, words_of
from .requests import Row
from .wave import Machine


@dataclass(frozen=True)
class Round:
    """What one round brought a row.

    Attributes:
        guesses: words that its first layers drafted.
        words: what the whole stack says at each position; one more than ``guesses``, unless those end in an EOS.
    """

    row: Row
    guesses: Sequence[int]
    words: Sequence[int]


class Rounds(Protocol):
    """Takes rows of one draft through a round; ``verify_s``: seconds of the layers above the draft in the last one."""

    verify_s: float

    def __call__(self, rows: Sequence[Row], draft: Draft) -> list[Round]: ...


def end_of_draft(row: Row, eos: int) -> int:
    """The word after which a row drafts no more; ``NOTHING`` where any may follow."""
    return NOTHING if row.options.ignore_eos else eos


class EagerRounds:
    """Rounds on a runner of plain torch."""

    def __init__(self, machine: Machine, eos: int) -> None:
        self._machine, self._lanes, self._eos, self.verify_s = machine, Lanes(machine), eos, 0.0

    def __call__(self, rows: Sequence[Row], draft: Draft) -> list[Round]:
        guesses: list[list[int]] = [[] for _ in rows]
        stood: list[list[Tensor]] = [[] for _ in rows]  # each position's hidden after the drafting layers
        going = list(range(len(rows)))
        while going:
            places = [len(stood[i]) for i in going]
            tokens = [guesses[i][-1] if guesses[i] else rows[i].next_input for i in going]
            at = self._lanes.at([rows[i] for i in going], places)
            hidden = previous = self._lanes.embed(tokens, at)
            for layer in range(1, draft.layer + 1):
                previous, hidden = hidden, self._lanes.layer(layer, hidden, at)
            for number, i in enumerate(going):
                stood[i].append(hidden[number])
            if not any(len(guesses[i]) < rows[i].ahead for i in going):
                break  # no row may draft more: what these layers would say is not asked
            words, sure = self._guess(hidden, previous, draft)
            drafting = []
            for number, i in enumerate(going):
                if len(guesses[i]) < rows[i].ahead and sure[number] and words[number] != NOTHING:
                    guesses[i].append(words[number])
                    if words[number] != end_of_draft(rows[i], self._eos):
                        drafting.append(i)
            self._machine.clock("checks")
            going = drafting
        return self._verified(rows, draft, guesses, stood)

    def _guess(self, hidden: Tensor, previous: Tensor, draft: Draft) -> tuple[list[int], list[bool]]:
        """The words of the drafting layers, and which of them are drafted."""
        machine = self._machine
        before = previous if draft.layer > 1 else None
        view = LayerView(draft.layer, hidden, before, machine.runner.logits, machine.classifier)
        words: list[int] = best(view.logits).tolist()
        if draft.measure is None:
            return words, [True] * len(words)
        return words, (CONFIDENCE[draft.measure](view) >= draft.threshold).tolist()

    def _verified(
        self, rows: Sequence[Row], draft: Draft, guesses: list[list[int]], stood: list[list[Tensor]]
    ) -> list[Round]:
        machine = self._machine
        lanes = [(row, place) for row, hiddens in zip(rows, stood, strict=True) for place in range(len(hiddens))]
        hidden = self._lanes.padded(torch.stack([each for hiddens in stood for each in hiddens]))
        at = self._lanes.at([row for row, _ in lanes], [place for _, place in lanes])
        began = machine.clock.now()
        for layer in range(draft.layer + 1, machine.num_layers + 1):
            hidden = self._lanes.layer(layer, hidden, at)
        self.verify_s = machine.clock.now() - began
        words = iter(words_of(machine, hidden, len(lanes)))
        return [
            Round(row, guessed, [next(words) for _ in hiddens])
            for row, guessed, hiddens in zip(rows, guesses, stood, strict=True)
        ]
