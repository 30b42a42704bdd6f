"""Each row's policy as numbers that sit on the device: when it may leave, by layer and position.

A policy is turned into tables once, at admission; inside the layer loop nobody asks an object.
"""

from collections import Counter
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calm.config import Measure
from calm.models.base import DecoderSpec
from calm.policies import Confident, Policy, Replay, SkipSchedule, fills_above, fixed_depth
from calm.thresholds import ThresholdSchedule

MEASURES = tuple(Measure)


@lru_cache(maxsize=64)  # requests that ask for the same threshold share it
def _table(
    schedule: ThresholdSchedule, exit_layers: tuple[int, ...], length: int, num_layers: int
) -> Float[Tensor, "steps layers"]:
    """What a confidence must reach, by position and layer; +inf where nobody may leave."""
    table = torch.full((length, num_layers), float("inf"))
    for step in range(length):
        for layer in exit_layers:
            table[step, layer - 1] = schedule.at(step, layer)
    return table


class Exits:
    """Policies of the rows in ``count`` slots, and of the padding slot after them.

    Attributes:
        thresholds: (count + 1, N, L); what a confidence must reach after a layer at a position; +inf where it may
            not leave: no exit layer, the last layer, a threshold of 1.
        depths: (count + 1, N); depth that the policy fixes at a position, 0 where confidences decide.
        measures: (count + 1,); index into ``MEASURES``, -1 without one.
        run_lengths: (count + 1,); k of ``agreement``, 0 for other measures.
        fills: (count + 1,); False where no token of the row reads K/V above its fixed depth: a row-exact rule need not
            fill them in.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        exit_layers: list[int],
        count: int,
        max_target: int,
        device: torch.device,
        record: bool = False,
    ) -> None:
        self._record = record  # then confidences are also measured where a threshold of 1 lets nobody out
        self._num_layers, self._exit_layers, self._length = spec.num_layers, tuple(exit_layers), max_target
        self.thresholds = torch.full((count + 1, max_target, spec.num_layers), float("inf"), device=device)
        self.depths = torch.zeros((count + 1, max_target), dtype=torch.long, device=device)
        self.measures = torch.full((count + 1,), -1, device=device)
        self.run_lengths = torch.zeros(count + 1, dtype=torch.long, device=device)
        self.fills = torch.ones(count + 1, dtype=torch.bool, device=device)
        self._used: dict[int, tuple[Measure, int]] = {}
        self._counts: Counter[tuple[Measure, int]] = Counter()

    @property
    def present(self) -> list[tuple[Measure, int]]:
        """Measures that some row is asked for, each with the run length of ``agreement``, 0 for others."""
        return list(self._counts)

    def put(self, slot: int, policy: Policy, row_id: str) -> None:
        """Raise ConfigError for a depth outside 1..L."""
        self.clear(slot)
        self.fills[slot] = fills_above(policy)
        if isinstance(policy, SkipSchedule):  # it names layers, and nobody leaves
            return
        if isinstance(policy, Replay):
            depths = [fixed_depth(policy, row_id, step, self._num_layers) or 0 for step in range(self._length)]
            self.depths[slot] = torch.tensor(depths)
        else:
            self.depths[slot] = fixed_depth(policy, row_id, 0, self._num_layers) or 0
        if isinstance(policy, Confident) and (self._record or not policy.schedule.exits_off):
            self.thresholds[slot] = _table(policy.schedule, self._exit_layers, self._length, self._num_layers)
            self._ask(slot, policy.measure, policy.agreement_k)
        elif isinstance(policy, Replay) and policy.measure is not None:
            self._ask(slot, policy.measure, policy.agreement_k)

    def _ask(self, slot: int, measure: Measure, agreement_k: int) -> None:
        """The row's confidences are computed at every checked layer, whatever comes of them."""
        self.measures[slot] = MEASURES.index(measure)
        self.run_lengths[slot] = agreement_k if measure is Measure.agreement else 0
        self._used[slot] = (measure, int(self.run_lengths[slot]))
        self._counts[self._used[slot]] += 1

    def move(self, source: int, target: int) -> None:
        for tensor in (self.thresholds, self.depths, self.measures, self.run_lengths, self.fills):
            tensor[target] = tensor[source]
        if source in self._used:
            self._used[target] = self._used.pop(source)
        self._blank(source)

    def clear(self, slot: int) -> None:
        if slot in self._used:
            used = self._used.pop(slot)
            self._counts[used] -= 1
            if not self._counts[used]:
                del self._counts[used]
        self._blank(slot)

    def _blank(self, slot: int) -> None:
        self.thresholds[slot] = float("inf")
        self.depths[slot] = 0
        self.measures[slot] = -1
        self.run_lengths[slot] = 0
        self.fills[slot] = True

    def at(
        self, slots: Int[Tensor, " batch"], steps: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch layers"], Int[Tensor, " batch"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """Thresholds, depths, measures and run lengths of rows at their positions."""
        return self.thresholds[slots, steps], self.depths[slots, steps], self.measures[slots], self.run_lengths[slots]
