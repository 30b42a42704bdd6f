"""Where the seconds of a decode step go, and how far they are from the layers' share of full depth: plain arithmetic.

A step here speaks as many tokens as the batch has rows: all seconds of a run by its tokens, times the rows.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timed_folder import Round

# phases of serve.accounting.Clock; all others are the host's. The native runner packs nothing: its ``packing`` is what
# the calls of its compiled step take beside their parts
PHASES = ("layers", "checks", "head", "read", "backfill", "packing", "start", "prefill", "slots")
HOST = "host"
ITEMS = {  # of the gap: phases whose time beyond the layers' share of full depth's each has
    "checks": ("checks",),
    "head": ("head", "read"),
    "backfill": ("backfill",),
    "encoder": ("prefill",),
    "packing": ("packing",),
    HOST: (HOST, "start", "slots"),
}
WAITING, SMALLER = "waiting", "smaller batches"


@dataclass(frozen=True)
class Cost:
    """Of one step.

    Attributes:
        seconds: by phase; they add up to ``step``.
        row_layers: rows of each layer that ran, summed.
        layers: mean layer that gave a token.
        rows: of the batch.
    """

    seconds: Mapping[str, float]
    row_layers: float
    layers: float
    rows: int

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


def phases(each: "Round", rows: int) -> dict[str, float]:
    """Seconds of a step by phase."""
    scale = rows / each.session.tokens
    found = {phase: scale * each.seconds.get(phase, 0.0) for phase in PHASES}
    return {**found, HOST: scale * sum(spent for phase, spent in each.seconds.items() if phase not in PHASES)}


def cost_of(rounds: "Sequence[Round]", rows: int) -> Cost:
    """Medians over the rounds, phase by phase."""
    each = [phases(one, rows) for one in rounds]
    last = rounds[-1]
    return Cost(
        {phase: statistics.median(one[phase] for one in each) for phase in (*PHASES, HOST)},
        row_layers=last.row_layers * rows / last.session.tokens,
        layers=last.layers,
        rows=rows,
    )


def mixed(low: Cost, high: Cost, share: float) -> Cost:
    """Between two costs: ``share`` of the way to the second."""

    def at(a: float, b: float) -> float:
        return (1 - share) * a + share * b

    return Cost(
        {phase: at(low.seconds[phase], high.seconds[phase]) for phase in low.seconds},
        at(low.row_layers, high.row_layers),
        at(low.layers, high.layers),
        low.rows,
    )


def ideal(full: Cost, mine: Cost) -> float:
    """Seconds of a step if every part of full depth's shrank as the layers do."""
    return full.step * share_of(full, mine)


def share_of(full: Cost, mine: Cost) -> float:
    """Mean layer of a token by all layers: what a layer ratio is the inverse of."""
    return mine.layers / full.layers


def gap(full: Cost, mine: Cost) -> dict[str, float]:
    """What a step takes beyond ``ideal``, in seconds, item by item: they add up to ``mine.step - ideal(full, mine)``.

    ``waiting``: layers that rows ran with after they had crossed, at full depth's price of a row's layer; ``smaller
    batches``: what the layers that ran cost beyond that price. Every other item: what its phases take beyond the
    layers' share of what they take at full depth.
    """
    share = share_of(full, mine)
    price = full.seconds["layers"] / full.row_layers
    found = {
        WAITING: (mine.row_layers - share * full.row_layers) * price,
        SMALLER: mine.seconds["layers"] - mine.row_layers * price,
    }
    for item, names in ITEMS.items():
        found[item] = sum(mine.seconds[name] - share * full.seconds[name] for name in names)
    return found
