"""A request on its way through the engine, and the answer it ends with."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from calm.policies import Policy

from .extent import Extent
from .options import RequestOptions

if TYPE_CHECKING:
    from .drift import Watch


class Status(str, Enum):
    waiting = "waiting"
    running = "running"
    finished = "finished"
    cancelled = "cancelled"
    failed = "failed"


class Reason(str, Enum):
    """Why an answer ended."""

    eos = "eos"
    stop = "stop"  # a stop string or stop id
    length = "length"
    cancelled = "cancelled"
    failed = "failed"


@dataclass(frozen=True)
class Timing:
    """Seconds of one request on one clock (time.perf_counter).

    Attributes:
        arrived, admitted, first_token, ended: when; 0 where it did not come to that.
    """

    arrived: float
    admitted: float
    first_token: float
    ended: float

    @property
    def waited(self) -> float:
        return max(0.0, (self.admitted or self.ended) - self.arrived)


@dataclass(frozen=True)
class Answer:
    """What a request got. Sequences have one entry a token.

    Attributes:
        id: of the request.
        status: finished, cancelled or failed.
        reason: why it ended.
        text: without control tokens, cut before a stop string.
        tokens: ids, EOS included when it was emitted.
        certified: the certificate of the model folder speaks of this answer (design.md section 4).
        crossing_layers, emission_layers, executed_layers, backfilled_layers: as in calm.records.DecodeTrace.
        involuntary: tokens that a mate made it speak before it had crossed.
        parked: waves for which it waited for company.
        confidences: per token by layer, where they are recorded.
        rounds, drafted, accepted: of a request that drafts: rounds, and words that its first layers drafted in them and
            that the whole stack said too.
        error: why it failed; one line.
    """

    id: str
    status: Status
    reason: Reason
    text: str
    tokens: tuple[int, ...]
    certified: bool
    crossing_layers: tuple[int, ...]
    emission_layers: tuple[int, ...]
    executed_layers: tuple[int, ...]
    backfilled_layers: tuple[int, ...]
    involuntary: int
    parked: int
    timing: Timing
    confidences: tuple[tuple[float, ...], ...] = ()
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str = ""


@dataclass(eq=False)
class Row:
    """One request's state.

    Attributes:
        number: order of arrival, from 0.
        source: token ids, EOS last.
        limit: tokens at most.
        next_input: the token that the next step embeds.
        fills: layers above its tokens' are filled in.
        stops: by layer, the last step that writes its K/V, see Extent.
        watch: what its depth says of drift, see certified.Resolved.
        slot: of its K/V, -1 while waiting.
        exempt: characters at the beginning within which a stop string does not count: they are of ``min_tokens``.
    """

    id: str
    number: int
    source: tuple[int, ...]
    options: RequestOptions
    policy: Policy
    certified: bool
    limit: int
    next_input: int
    fills: bool = True
    stops: tuple[int, ...] = ()
    watch: "Watch | None" = None
    key: bytes = b""
    slot: int = -1
    status: Status = Status.waiting
    reason: Reason | None = None
    error: str = ""
    text: str | None = None  # where a stop string cut it
    exempt: int = 0
    tokens: list[int] = field(default_factory=list)
    crossing: list[int] = field(default_factory=list)
    emission: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    confidences: list[tuple[float, ...]] = field(default_factory=list)
    involuntary: int = 0
    parked: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the source."""
        return len(self.source)

    @property
    def step(self) -> int:
        """Position of the next token: 0 at the first."""
        return len(self.tokens)

    @property
    def ahead(self) -> int:
        """Words that its next round may draft, each of which needs room for its K/V."""
        draft = self.options.draft
        return 0 if draft is None else min(draft.length, self.limit - self.step - 1)

    @property
    def reach(self) -> int:
        """The last position that its next step writes, counted as ``step`` is: words that it drafts lie ahead."""
        return self.step + (self.ahead if self.tokens else 0)

    @property
    def extent(self) -> Extent:
        """How much of it a slot has to hold."""
        return Extent(self.length, self.limit, self.stops)

    @property
    def reaches(self) -> tuple[Extent, int]:
        """What a slot needs room for at its next step."""
        return self.extent, self.reach

    @property
    def over(self) -> bool:
        return self.status not in (Status.waiting, Status.running)

    @property
    def seed(self) -> int:
        return self.number if self.options.seed is None else self.options.seed

    def record(self, token: int, crossing: int, emission: int, executed: int, involuntary: bool) -> None:
        self.tokens.append(token)
        self.next_input = token
        self.crossing.append(crossing)
        self.emission.append(emission)
        self.executed.append(executed)
        self.involuntary += involuntary

    def end(self, status: Status, reason: Reason, error: str = "") -> None:
        self.status, self.reason, self.error = status, reason, error
        self.ended = time.perf_counter()

    def answer(self, decode: Callable[[list[int]], str], num_layers: int) -> Answer:
        """The answer of a row that is over."""
        assert self.reason is not None
        return Answer(
            id=self.id,
            status=self.status,
            reason=self.reason,
            text=decode(self.tokens) if self.text is None else self.text,
            tokens=tuple(self.tokens),
            certified=self.certified and self.status is Status.finished,
            crossing_layers=tuple(self.crossing),
            emission_layers=tuple(self.emission),
            executed_layers=tuple(self.executed),
            backfilled_layers=tuple(num_layers - layer if self.fills else 0 for layer in self.emission),
            involuntary=self.involuntary,
            parked=self.parked,
            timing=Timing(self.arrived, self.admitted, self.first_token, self.ended),
            confidences=tuple(self.confidences),
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            error=self.error,
        )


def one_line(error: Exception) -> str:
    """What an error says, in one line; its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
