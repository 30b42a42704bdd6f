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
        edges: by layers skipped (1..L-1), cosines, ascending; a cosine at an edge belongs above it.
        errors: likewise, one more than edges: of the intervals between them.

    Raises:
        ConfigError: the numbers make no table.
    """

    edges: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        values = [value for row in self.errors for value in row]
        if not values or len(self.edges) != len(self.errors):
            raise ConfigError(
                f"error table: {len(self.edges)} rows of edges and {len(self.errors)} of errors; give one of each for "
                "every number of layers skipped"
            )
        for edges, errors in zip(self.edges, self.errors, strict=True):
            if list(edges) != sorted(set(edges)) or len(errors) != len(edges) + 1:
                raise ConfigError(
                    f"error table: edges must ascend and have one error more, got {list(edges)} and {list(errors)}"
                )
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise ConfigError("error table: errors must be finite and at least 0")

    @classmethod
    def flat(cls, num_layers: int, error: float = 1.0) -> "ErrorTable":
        """Every exit costs the same, however many layers it skips: a budget of k of them ends after k exits."""
        return cls(((),) * (num_layers - 1), ((error,),) * (num_layers - 1))

    def expected(self, skipped: int, cosine: float) -> float:
        """Of an exit that skips so many layers (1..L-1)."""
        return self.errors[skipped - 1][bisect_right(self.edges[skipped - 1], cosine)]

    def check_depth(self, num_layers: int) -> None:
        """Raise ConfigError where it is a table for another depth."""
        if len(self.errors) != num_layers - 1:
            raise ConfigError(
                f"error table: it is for {len(self.errors) + 1} layers and the model has {num_layers}; calibrate it "
                "on this model"
            )

    def to_json(self) -> dict[str, Any]:
        return {"edges": [list(row) for row in self.edges], "errors": [list(row) for row in self.errors]}


def error_table(
    skipped: Int[np.ndarray, " exits"],
    cosine: Float[np.ndarray, " exits"],
    error: Float[np.ndarray, " exits"],
    num_layers: int,
    bins: int = 4,
    least: int = 20,
) -> ErrorTable:
    """Mean error by layers skipped and by quantile of their cosines.

    A number of layers skipped has so many ``bins`` where each gets ``least`` exits, else one; where it has not even
    these, the mean error of a skipped layer times their number.

    Raises:
        ConfigError: no exit, or a number out of range.
    """
    if not len(skipped):
        raise ConfigError("error table: no exit to calibrate from; take more articles or a lower threshold")
    if bins < 1 or skipped.min() < 1 or skipped.max() >= num_layers:
        raise ConfigError(f"error table: needs bins >= 1 and exits that skip 1..{num_layers - 1} layers")
    of_a_layer, edges, errors = error.sum() / skipped.sum(), list[tuple[float, ...]](), list[tuple[float, ...]]()
    for count in range(1, num_layers):
        here, cosines = error[skipped == count], cosine[skipped == count]
        cut = np.quantile(cosines, np.arange(1, bins) / bins) if len(here) >= bins * least else np.array([])
        place = np.searchsorted(cut, cosines, side="right")
        cells = [here[place == number] for number in range(len(cut) + 1)]
        if min(map(len, cells)) < least:  # too few exits, or so many of one cosine that a quantile has none
            cut, cells = np.array([]), [here]
        edges.append(tuple(map(float, cut)))
        errors.append(tuple(float(each.mean() if len(each) >= least else of_a_layer * count) for each in cells))
    return ErrorTable(tuple(edges), tuple(errors))
