"""Who takes part in a simulation: requests with recorded depths, and what of an engine they meet."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .confidence import HEAD_MEASURES
from .config import Measure
from .rules import bucket_of, padded_length


@runtime_checkable
class HasCrossings(Protocol):
    """A DecodeTrace, or an answer of the engine."""

    @property
    def crossing_layers(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Trace:
    """One request of a simulation.

    Attributes:
        depths: crossing layer of each of its tokens, 1..L.
        source: tokens of its source.
        arrived: second at which it comes.
        measures: that its policy asks; none where depths are given without one.
        key: of its source; requests with the same one share an encoder call. None: nobody else has it.
        fills: K/V above its exits are filled in; a row-exact rule leaves that out where its depth is always the same.
    """

    depths: tuple[int, ...]
    source: int = 1
    arrived: float = 0.0
    measures: frozenset[Measure] = frozenset()
    key: str | None = None
    fills: bool = True


def traces_of(recorded: Iterable[HasCrossings], measures: Iterable[Measure] = (), source: int = 1) -> list[Trace]:
    """Requests that come all at once and do what was recorded."""
    asked = frozenset(measures)
    return [Trace(row.crossing_layers, source, measures=asked) for row in recorded if row.crossing_layers]


@dataclass(frozen=True)
class Setting:
    """What of an engine a simulation needs to know; as serve.options.EngineOptions has it.

    Attributes:
        buckets: batch sizes, ascending; the last is the number of slots.
        checked: layers after which confidences are asked.
        packed: rows are packed into buckets and backfilled from the lowest exit (the eager runner); else a layer runs
            on the rows that it has and fills in only those that need it.
        padded_calls: sources go into encoder calls of one shape; else any go together (the native runner).
        one_piece: a step is one call (the graph runner): no row waits for company between two layers, layers after its
            end are passed through all the same, and the head and backfill are one call each.
        prompted: a row's first token is said by its prompt, from layer L, without a layer (decoder-only models).
        overlaps: what the host does for a step is hidden behind the device's part of the next, or the other way round.
        cross_cache_rows, cross_cache_tokens: sources whose cross K/V is kept, and tokens of all of them (None: any).
    """

    num_layers: int
    buckets: tuple[int, ...]
    checked: frozenset[int]
    max_source: int = 1 << 30
    prefill_rows: int = 4
    prefill_calls: int = 2
    source_multiple: int = 16
    cross_cache_rows: int = 64
    cross_cache_tokens: int | None = None
    packed: bool = True
    padded_calls: bool = True
    one_piece: bool = False
    prompted: bool = False
    overlaps: bool = False

    def bucket(self, rows: int) -> int:
        return bucket_of(self.buckets, rows)

    def padded(self, length: int) -> int:
        return padded_length(length, self.source_multiple, self.max_source)

    def alike(self, length: int) -> int:
        """Sources for which this is the same number may be encoded together."""
        return self.padded(length) if self.padded_calls else 0


@dataclass(eq=False)
class SimRow:
    """A request on its way.

    Attributes:
        number: order of arrival.
        prompted: its first token is said by its prompt.
        first_token, ended: seconds on the simulated clock.
    """

    number: int
    trace: Trace
    prompted: bool = False
    slot: int = -1
    emission: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    parked: int = 0
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def key(self) -> Hashable:
        return self.number if self.trace.key is None else self.trace.key

    @property
    def length(self) -> int:
        return self.trace.source

    @property
    def depth(self) -> int:
        """Of its next token."""
        return self.trace.depths[len(self.emission)]

    @property
    def climbs(self) -> bool:
        """Its next token is for the layers to say."""
        return bool(self.emission) or not self.prompted

    @property
    def asks_head(self) -> bool:
        """Its confidence is read from the vocabulary."""
        return any(measure in HEAD_MEASURES for measure in self.trace.measures)

    @property
    def over(self) -> bool:
        return len(self.emission) == len(self.trace.depths)
