"""A decoder-only model's prompts say the first tokens of the answers: they were read at full depth, whatever a policy
says of the tokens that follow (SkipDecode, 2307.02628, section 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .heads import HeadState
from .paged import PagedSlots
from .requests import Row
from .wave import Machine, Spoken


def first_words(machine: Machine, rows: Sequence[Row], bucket: int | None = None) -> Spoken:
    """What the prompts of these rows say, in a bucket that is the smallest that holds them unless it is given."""
    slots, last, count = machine.runner.slots, machine.num_layers, len(rows)
    assert isinstance(slots, PagedSlots)
    padding = (bucket or machine.bucket(count)) - count
    places = torch.tensor([row.slot for row in rows] + [slots.padding] * padding, device=machine.device)
    hidden = slots.said[places]  # (bucket, d_model)
    live = torch.arange(count + padding, device=machine.device) < count
    tokens = machine.head.emit(hidden, torch.zeros_like(live), HeadState(live=live))[:count].tolist()
    machine.clock("head")
    return Spoken(
        rows=list(rows),
        tokens=tokens,
        crossing=[last] * count,
        emission=[last] * count,
        executed=[last] * count,
        involuntary=[False] * count,
        states=lambda: hidden,
        logits=lambda: machine.runner.logits(hidden),
        confidences=[[float("nan")] * last for _ in rows] if machine.record else None,
    )
