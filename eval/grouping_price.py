"""What many steps cost by a cost table: the sums of calm.simulate for rules that keep a batch together, all at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from calm.confidence import HEAD_MEASURES
from calm.config import Measure
from calm.cost import CostTable, backfilling, checking
from calm.errors import ConfigError
from calm.sim_rows import Setting


@dataclass(frozen=True)
class Prices:
    """Prices of an engine on a CPU.

    Raises ConfigError for an engine whose step is one piece (the graph runner's): calm.simulate has its sums.
    """

    table: CostTable
    setting: Setting

    def __post_init__(self) -> None:
        if self.setting.one_piece or self.setting.overlaps:
            raise ConfigError("steps of the graph runner are not priced here; choose runner native or eager")

    def steps(
        self,
        counts: Int[np.ndarray, "steps layers"],
        stop: Int[np.ndarray, " steps"],
        measures: frozenset[Measure],
        *,
        holds: bool,
        gathered: bool = False,
    ) -> Float[np.ndarray, " steps"]:
        """Seconds of each step.

        Args:
            counts: rows by the layer that they cross at.
            stop: layers that it runs.
            measures: that its rows ask; none where depths are given.
            holds: crossed rows keep their hidden (rules own and quantile); else all speak from the last layer (sync).
            gathered: its rows may sit in any slots.
        """
        setting, last = self.setting, counts.shape[1]
        rows, above = counts.sum(axis=1), counts[:, ::-1].cumsum(axis=1)[:, ::-1]  # rows that cross at a layer or later
        sizes = np.unique(rows)
        bucket = np.array([setting.bucket(int(each)) for each in sizes])[np.searchsorted(sizes, rows)]
        everyone = np.ones(len(rows), dtype=bool)
        seconds = self.table.at("step") + self.table.at("row") * rows + self._at("start", bucket, everyone)
        seconds = seconds + stop * self._at("layer_gathered" if gathered else "layer", bucket, everyone)
        for layer in range(1, last + 1):
            ran, asked = stop >= layer, above[:, layer - 1] if holds else rows
            asks = ran & (everyone if setting.packed else asked > 0)
            if not measures or layer not in setting.checked:
                asks = ~everyone
            name = checking(measures, layer == min(setting.checked, default=0))
            seconds = seconds + self._at(name, bucket if setting.packed else asked, asks)
            seconds = seconds + self._at(checking(()), bucket, ran & ~asks)
        early = np.zeros_like(rows)
        if last > 1 and any(measure in HEAD_MEASURES for measure in measures):
            crossed = counts.cumsum(axis=1)[np.arange(len(rows)), np.minimum(stop, last - 1) - 1]
            early = np.where(holds | (stop < last), crossed, 0)
        late = rows - early
        if setting.packed:
            seconds = seconds + self._at("head", bucket, late > 0) + self._at("early_head", bucket, late == 0)
            for skipped in range(1, last):
                seconds = seconds + self._at(backfilling(skipped), bucket, stop == last - skipped)
        else:
            seconds = seconds + self._at("head", late, late > 0) + self._at("early_head", early, early > 0)
            seconds = seconds + (last - stop) * self._at(backfilling(1), rows, stop < last)
        found: Float[np.ndarray, " steps"] = seconds + self._at("read", bucket, everyone)
        return found

    def requests(self, sources: Sequence[int]) -> float:
        """Seconds that requests with so many source tokens take beside the steps: encoder, admission and end."""
        share = 1 / self.setting.prefill_rows
        encoder = sum(self.table.at("encode", self.setting.padded(length)) for length in sources) * share
        return encoder + len(sources) * (self.table.at("admit") + self.table.at("end"))

    def _at(
        self, name: str, sizes: Int[np.ndarray, " steps"], which: Bool[np.ndarray, " steps"]
    ) -> Float[np.ndarray, " steps"]:
        """An entry at each step's size, 0 for the others."""
        found = np.zeros(len(sizes))
        if which.any():
            there, places = np.unique(sizes[which], return_inverse=True)
            found[which] = np.array([self.table.at(name, int(size)) for size in there])[places]
        return found
