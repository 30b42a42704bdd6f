"""How wrong the backfilled keys and values of an exit are expected to be, and a budget of it (River-LLM, 2604.18396).

River-LLM foretells from the likeness of a block's input and output how keys and values go wrong while layers are left
out, and lets that decide who leaves. Here the same likeness, the cosine of the residual stream after the exit layer
with the one a layer below, and the number of layers skipped look a mean error up in a table that was calibrated from
decodes of which both the written and the true keys and values are known; ``calm.policies.Budgeted`` adds it up.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """Expected error of one exit.

    An error is the mean over all L layers of ``|written - true| / |true|``, of keys and of values, 0 in layers that
    ran: so 1 is a position whose keys and values are as far off as they are long, in every layer.

    Attributes:
        edges: of the cosine, ascending; a cosine at an edge belongs above it.
        errors: by layers skipped (1..L-1), then by interval of the cosine: one more than there are edges.

    Raises:
        ConfigError: the numbers make no table.
    """

    edges: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        values = [value for row in self.errors for value in row]
        if list(self.edges) != sorted(set(self.edges)):
            raise ConfigError(f"error table: edges must ascend, got {list(self.edges)}")
        if not values or any(len(row) != len(self.edges) + 1 for row in self.errors):
            raise ConfigError(
                f"error table: {len(self.edges)} edges need rows of {len(self.edges) + 1} errors, and there must be one"
            )
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise ConfigError("error table: errors must be finite and at least 0")

    @classmethod
    def flat(cls, num_layers: int, error: float = 1.0) -> "ErrorTable":
        """Every exit costs the same, however many layers it skips: a budget of k of them ends after k exits."""
        return cls((), ((error,),) * (num_layers - 1))

    def expected(self, skipped: int, cosine: float) -> float:
        """Of an exit that skips so many layers (1..L-1)."""
        return self.errors[skipped - 1][bisect_right(self.edges, cosine)]

    def check_depth(self, num_layers: int) -> None:
        """Raise ConfigError where it is a table for another depth."""
        if len(self.errors) != num_layers - 1:
            raise ConfigError(
                f"error table: it is for {len(self.errors) + 1} layers and the model has {num_layers}; calibrate it "
                "on this model"
            )

    def to_json(self) -> dict[str, Any]:
        return {"edges": list(self.edges), "errors": [list(row) for row in self.errors]}


def error_table(
    skipped: Int[np.ndarray, " exits"],
    cosine: Float[np.ndarray, " exits"],
    error: Float[np.ndarray, " exits"],
    num_layers: int,
    bins: int = 4,
    least: int = 20,
) -> ErrorTable:
    """Mean error by layers skipped and by quantile of the cosine.

    A cell with fewer than ``least`` exits takes the mean of its number of layers skipped; where that has as few too,
    the mean error of a skipped layer times their number.

    Raises:
        ConfigError: no exit, or a number out of range.
    """
    if not len(skipped):
        raise ConfigError("error table: no exit to calibrate from; take more articles or a lower threshold")
    if bins < 1 or skipped.min() < 1 or skipped.max() >= num_layers:
        raise ConfigError(f"error table: needs bins >= 1 and exits that skip 1..{num_layers - 1} layers")
    edges = tuple(sorted({float(each) for each in np.quantile(cosine, np.arange(1, bins) / bins)}))
    place = np.searchsorted(np.array(edges), cosine, side="right")
    of_a_layer = error.sum() / skipped.sum()
    rows = []
    for count in range(1, num_layers):
        here = skipped == count
        middle = float(error[here].mean()) if here.sum() >= least else float(of_a_layer * count)
        cells = [here & (place == number) for number in range(len(edges) + 1)]
        rows.append(tuple(float(error[cell].mean()) if cell.sum() >= least else middle for cell in cells))
    return ErrorTable(edges, tuple(rows))
