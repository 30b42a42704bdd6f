"""Batch rules: who waits for whom while a batch climbs the layers (design.md section 4; arXiv 2407.20272, Algorithm 1).

The eager engine and the simulator run this very code over their own waves, so what they do layer by layer is the same
by construction; the native runner tells it in C++ (serve/native/step.cpp) and is proven to do the same. A rule knows
flags, never models.

Row-exact rules (``own``, ``compact``, ``rebatch``) give every row the tokens that it has alone; they differ in work.
Batch-coupled rules (``sync``, ``quantile``, ``lockstep``) let a row's mates decide where it speaks.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from .config import BatchRule
from .errors import ConfigError

ROW_EXACT = (BatchRule.own, BatchRule.compact, BatchRule.rebatch, BatchRule.auto)


@dataclass(frozen=True, slots=True)
class Flags:
    """Where the rows of a wave stand after a layer, on the device, one entry a row.

    Attributes:
        live: False for padding.
        crossed: the row's confidence reached its threshold at this or an earlier layer of this step (sticky).
        now: it reaches the threshold at this very layer.
    """

    live: Bool[Tensor, " rows"]
    crossed: Bool[Tensor, " rows"]
    now: Bool[Tensor, " rows"]


@dataclass(frozen=True)
class Rule:
    """One batch rule.

    Attributes:
        name: own, compact, rebatch, sync, quantile or lockstep.
        share: quantile only: the share of the live rows that ends the step.
        company: rebatch only: rows that a deeper layer waits for; fewer are parked.
        max_age: rebatch only: waves that a parked row waits at most. Age runs a small batch, it never exits a row.
    """

    name: BatchRule
    share: float = 1.0
    company: int = 1
    max_age: int = 8

    def __post_init__(self) -> None:
        if self.name is BatchRule.auto:
            raise ConfigError("rule 'auto' is a choice among own, compact and rebatch; the engine makes it")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"quantile must lie in (0, 1], got {self.share}")
        if self.company < 1 or self.max_age < 1:
            raise ConfigError("company and max_age must be at least 1")

    @property
    def row_exact(self) -> bool:
        """Tokens do not depend on mates."""
        return self.name in ROW_EXACT

    @property
    def holds(self) -> bool:
        """A crossed row keeps its crossing hidden while its mates go on."""
        return self.row_exact or self.name is BatchRule.quantile

    @property
    def leaves(self) -> bool:
        """A crossed row leaves the batch at once."""
        return self.name in (BatchRule.compact, BatchRule.rebatch)

    @property
    def waits(self) -> bool:
        """Rows that are too few to go on wait for company."""
        return self.name is BatchRule.rebatch

    def stop(self, flags: Flags) -> Bool[Tensor, ""]:
        """Whether the wave ends after this layer: 0-d, on the device."""
        if self.name is BatchRule.lockstep:  # t5x: everyone at the same layer, no memory
            return (flags.now | ~flags.live).all()
        if self.name is BatchRule.quantile:
            return (flags.crossed & flags.live).sum() >= self.share * flags.live.sum()
        return (flags.crossed | ~flags.live).all()


class Wave(Protocol):
    """Rows on their way through the layers: the engine's are tensors, the simulator's are recorded depths."""

    @property
    def layer(self) -> int:
        """Layers that its rows have behind them."""
        ...

    @property
    def size(self) -> int:
        """Rows that are still climbing."""
        ...

    age: int  # waves for which it has been parked

    def run(self, layer: int) -> None:
        """Run the layer on every row that is in the batch."""
        ...

    def check(self, layer: int) -> Flags:
        """Ask the confidences after the layer."""
        ...

    def told(self, flag: Bool[Tensor, ""]) -> bool:
        """Read a flag. A runner that decides on the device answers False and predicates what follows."""
        ...

    def leave(self) -> None:
        """Let crossed rows out: later layers run without them."""
        ...

    def join(self, other: Any) -> None:
        """Take in rows that wait at the same layer."""
        ...

    def part(self) -> Any:
        """Take the rows that have not crossed out, as a wave of their own."""
        ...

    def speak(self) -> None:
        """Tokens of the rows that are through, K/V above their exits."""
        ...


def climb(wave: Any, rule: Rule, num_layers: int, parked: list[Any], patient: bool = True) -> None:
    """Take a wave up, layer by layer, until the rule ends it, and let it speak.

    Under ``rebatch`` rows that are too few to go on are put into ``parked``, unless they are to go on as they are.
    """
    for layer in range(wave.layer + 1, num_layers + 1):
        wave.run(layer)
        flags = wave.check(layer)
        if wave.told(rule.stop(flags)) or layer == num_layers:
            break
        if rule.leaves:
            wave.leave()
            for waiting in [other for other in parked if other.layer == layer]:
                parked.remove(waiting)
                wave.join(waiting)
            if rule.waits and patient and wave.size < rule.company and wave.age <= rule.max_age:
                parked.append(wave.part())
                break
    wave.speak()


def next_parked(parked: Sequence[Any], rule: Rule, fresh: int) -> Any | None:
    """The parked wave whose turn it is, or None where rows at layer 0 go first.

    The oldest beyond its age first; else, with nobody at layer 0, the deepest: it ends soonest.
    """
    for wave in parked:
        wave.age += 1
    old = [wave for wave in parked if wave.age > rule.max_age]
    if old:
        return max(old, key=lambda wave: wave.age)
    if not fresh and parked:
        return max(parked, key=lambda wave: wave.layer)
    return None


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The smallest batch size that holds ``rows``; ``buckets`` ascend."""
    return next(size for size in buckets if size >= rows)


def padded_length(length: int, multiple: int, longest: int) -> int:
    """Tokens that a source of ``length`` is padded to: a multiple, but never more than the model takes."""
    return min(-(-length // multiple) * multiple, longest)


@runtime_checkable
class Queued(Protocol):
    """A request that waits for a slot: the name of its source and how many tokens that has."""

    @property
    def key(self) -> object: ...

    @property
    def length(self) -> int: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


def next_group(
    queue: Sequence[QueuedT], rows: int, alike: Callable[[int], int], known: Container[object]
) -> list[QueuedT]:
    """The requests of a queue, at most ``rows``, that are encoded together next.

    The first in line is always among them; a request whose source is ``known`` needs no encoder and goes alone. The
    others are those that are alike by length, in order. So nobody is passed over for longer than it takes to become
    first.
    """
    if queue[0].key in known:
        return [queue[0]]
    kind = alike(queue[0].length)
    fitting = (each for each in queue if alike(each.length) == kind and each.key not in known)
    return list(islice(fitting, rows))
