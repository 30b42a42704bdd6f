"""What a decode step costs: seconds measured on this machine, and multiplications and bytes counted from shapes.

A cost table belongs to one engine on one machine. The simulator (calm.simulate) adds its entries up; nothing is
interpolated between them: what was not measured is refused.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import Measure
from .errors import ConfigError
from .models.base import DecoderSpec


def checking(measures: Iterable[Measure], first: bool = False) -> str:
    """Name of a check that asks these measures; ``first``: at the first layer that is checked."""
    names = "+".join(sorted(measure.value for measure in measures))
    return f"{'first_' if first and names else ''}check{':' if names else ''}{names}"


def backfilling(layers: int) -> str:
    """Name of a backfill of so many layers."""
    return f"backfill:{layers}"


@dataclass(frozen=True)
class CostTable:
    """Seconds by what is done and its size.

    Attributes:
        seconds: name -> size -> seconds. The size is a bucket unless said otherwise. Names:
            ``start`` set-up of a wave, and what its first layer takes longer than others; ``layer`` one layer whose
            rows sit in neighbouring slots, ``layer_gathered`` in any slots; ``check`` of flags alone,
            ``check:softmax+state`` of these measures, ``first_check:...`` at the first layer checked; ``stay`` asking
            who leaves where nobody does; ``pack`` letting rows out of the bucket; ``join`` into the bucket;
            ``resume`` of parked rows, where it costs anything; ``merge`` and, for each part, ``part``: bringing a wave
            together that rows had left; ``head``, and ``early_head`` where confidences that read the head let every
            row out; ``read`` of the tokens; ``backfill:3`` of three layers; ``idle`` a layer that no row runs any more,
            where it costs anything; ``encode`` of one call, by padded source length;
            of size 1: ``admit`` a row, ``end`` a row, ``move`` a row to another slot, ``step`` and ``row``: what
            the host does per step and per token.
        repeats: of which each entry is the median.
        environment: where it was measured (calm.environment).
    """

    seconds: Mapping[str, Mapping[int, float]]
    repeats: int = 1
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, sizes in self.seconds.items():
            for size, value in sizes.items():
                if not (math.isfinite(value) and value >= 0.0):
                    raise ConfigError(f"cost table: {name!r} at {size} takes {value} seconds; measure it again")

    def at(self, name: str, size: int = 1) -> float:
        """Seconds of one entry.

        Raises:
            ConfigError: it was not measured.
        """
        try:
            return self.seconds[name][size]
        except KeyError:
            there = ", ".join(str(known) for known in self.seconds.get(name, ())) or "no size"
            raise ConfigError(f"the cost table has {name!r} at {there}, not at {size}; measure it there") from None

    def plus(self, more: Mapping[str, Mapping[int, float]]) -> "CostTable":
        """This table with further entries."""
        names = [*self.seconds, *(name for name in more if name not in self.seconds)]
        merged = {name: {**self.seconds.get(name, {}), **more.get(name, {})} for name in names}
        return CostTable(merged, self.repeats, self.environment)

    def to_json(self) -> str:
        whole = {"repeats": self.repeats, "environment": self.environment, "seconds": self.seconds}
        return json.dumps(whole, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Raise ConfigError where ``text`` is no cost table."""
        try:
            whole = json.loads(text)
            seconds = {
                str(name): {int(size): float(value) for size, value in sizes.items()}
                for name, sizes in whole["seconds"].items()
            }
            return cls(seconds, int(whole["repeats"]), dict(whole["environment"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"this is no cost table ({type(error).__name__}: {error}); measure one anew") from None


@dataclass(frozen=True)
class Work:
    """What one thing costs whatever the machine.

    Attributes:
        macs: multiply-accumulates for one row.
        weight_bytes: of weights, read once for the whole batch.
        row_bytes: of K and V, read for every row.
    """

    macs: int
    weight_bytes: int
    row_bytes: int = 0


def layer_work(spec: DecoderSpec, keys: int = 0, source: int = 0, width: int = 4) -> Work:
    """One decoder layer for one token, cross K/V cached.

    ``keys``: self-attention positions read; ``source``: tokens of the source; ``width``: bytes of a number.
    """
    inner, shared = spec.num_heads * spec.d_kv, spec.num_kv_heads * spec.d_kv
    projections = spec.d_model * (2 * inner + 2 * shared + (2 * inner if spec.cross_attention else 0))
    feed_forward = (3 if spec.gated else 2) * spec.d_model * spec.d_ff
    seen = keys + source  # without cross-attention the source stands before the answer in one sequence
    mixed, read = 2 * inner * seen, 2 * shared * seen  # scores and mixture; K and V
    return Work(projections + feed_forward + mixed, (projections + feed_forward) * width, read * width)


def backfill_work(spec: DecoderSpec, width: int = 4) -> Work:
    """K and V of one layer for one token."""
    macs = 2 * spec.d_model * spec.num_kv_heads * spec.d_kv
    return Work(macs, macs * width)


def head_work(spec: DecoderSpec, width: int = 4) -> Work:
    """Logits of one token over the whole vocabulary."""
    macs = spec.head_width * spec.vocab_size
    if spec.head_width != spec.d_model:
        macs += spec.d_model * spec.head_width
    return Work(macs, macs * width)


def cross_work(spec: DecoderSpec, source: int, width: int = 4) -> Work:
    """Cross K and V of one layer for a source of so many tokens: paid once a request."""
    weights = 2 * spec.d_model * spec.num_heads * spec.d_kv if spec.cross_attention else 0
    return Work(weights * source, weights * width)
