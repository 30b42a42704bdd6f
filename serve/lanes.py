"""Positions of rows as the rows of one batch, on a runner of plain torch: several of one row may be among them.

And what they say where no confidence has chosen their layer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calm.rules import bucket_of

from .heads import HeadState
from .requests import Row
from .wave import Machine, Spoken

Places = tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]  # slots and positions


class Lanes:
    """What runs them on an engine's machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def at(self, rows: Sequence[Row], places: Sequence[int]) -> Places:
        """Each row ``places`` positions behind its own."""
        slots = torch.tensor([row.slot for row in rows])
        steps = torch.tensor([row.step + place for row, place in zip(rows, places, strict=True)])
        return self.padded(slots, self.machine.runner.slots.padding), self.padded(steps)

    def padded(self, values: Tensor, filler: int = 0) -> Tensor:
        """As many as a bucket holds; more than the largest stay as many as they are."""
        count, machine = values.shape[0], self.machine
        size = bucket_of(machine.buckets, count) if count <= machine.buckets[-1] else count
        padding = values.new_full((size - count, *values.shape[1:]), filler)
        return torch.cat([values, padding]).to(machine.device)

    def embed(self, tokens: Sequence[int], at: Places) -> Float[Tensor, "batch d_model"]:
        return self.machine.runner.embed(self.padded(torch.tensor(tokens)), *at)

    def layer(self, layer: int, hidden: Float[Tensor, "batch d_model"], at: Places) -> Float[Tensor, "batch d_model"]:
        """All K/V of the batch are written before any are read, and a row reads none behind its own position."""
        hidden = self.machine.runner.layer(layer, hidden, *at, False)
        self.machine.clock.layer(hidden.shape[0])
        return hidden


def words_of(machine: Machine, hidden: Float[Tensor, "batch d_model"], count: int) -> list[int]:
    """Words of the first ``count`` hidden states; those that follow are padding."""
    live = torch.arange(hidden.shape[0], device=hidden.device) < count
    state = HeadState(live=live)
    words: list[int] = machine.head.emit(hidden, torch.zeros_like(live), state)[:count].tolist()
    machine.clock.fallbacks += state.fallbacks
    machine.clock("head")
    return words


def spoken(
    machine: Machine, rows: Sequence[Row], hidden: Float[Tensor, "batch d_model"], layer: int, executed: int
) -> Spoken:
    """What rows say that all speak at ``layer``, with ``executed`` layers run; ``hidden`` may be padded."""
    count, nothing = len(rows), [float("nan")] * machine.num_layers
    return Spoken(
        list(rows),
        words_of(machine, hidden, count),
        crossing=[layer] * count,
        emission=[layer] * count,
        executed=[executed] * count,
        involuntary=[False] * count,
        states=lambda: hidden,
        logits=lambda: machine.runner.logits(hidden),
        confidences=[nothing] * count if machine.record else None,
    )
