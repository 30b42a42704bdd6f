"""A decoder-only model's prompts say the first tokens of the answers: they were read at full depth, whatever a policy
says of the tokens that follow (SkipDecode, 2307.02628, section 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calm.rules import padded_length

from .lanes import spoken
from .paged import PagedSlots
from .prefill import CrossKV, Read
from .requests import Row
from .wave import Machine, Spoken


class PromptPrefill:
    """Reads prompts one after another, whoever is in a call: a prompt's K/V are what they are alone, to the bit.

    Products over a prompt's many positions gain nothing from a second prompt, and padding would be paid for.

    Args:
        rows: that a cost table measures a call with.
        multiple: of tokens, at which it is measured.
    """

    padded_calls = False

    def __init__(self, read: Read, rows: int, multiple: int, max_source: int, device: torch.device) -> None:
        self._read, self.rows, self._multiple = read, rows, multiple
        self._max_source, self._device = max_source, device

    def padded(self, length: int) -> int:
        """Tokens of the prompt that a cost table has for one of this length."""
        return padded_length(length, self._multiple, self._max_source)

    def alike(self, length: int) -> int:
        """Any prompts may be read in one call."""
        return 0

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[CrossKV]:
        """K and V of each prompt, (layers, KV heads, prompt, d_kv), and its last hidden, (d_model,)."""
        found = []
        for source in sources:
            ids = torch.tensor([list(source)], device=self._device)
            keys, values, hidden = self._read(ids, torch.ones_like(ids, dtype=torch.bool))
            found.append((keys[:, 0], values[:, 0], hidden[0]))
        return found


def first_words(machine: Machine, rows: Sequence[Row], bucket: int) -> Spoken:
    """What the prompts of these rows say, in a bucket that holds them."""
    slots = machine.runner.slots
    assert isinstance(slots, PagedSlots)
    places = [row.slot for row in rows] + [slots.padding] * (bucket - len(rows))
    hidden = slots.said[torch.tensor(places, device=machine.device)]  # (bucket, d_model)
    return spoken(machine, rows, hidden, machine.num_layers, machine.num_layers)
