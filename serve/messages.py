"""What passes between the engine's process and whoever serves it: plain picklable values, one batch of them a step.

Times are seconds of ``time.perf_counter``, which all processes of a machine share.
"""

from dataclasses import dataclass
from typing import Any

from calm.layer_schedule import LayerSchedule

from .options import RequestOptions
from .requests import Reason, Status, Timing

# to the engine


@dataclass(frozen=True)
class Submit:
    """One request.

    Attributes:
        id: unique among those that are not over.
        source: its text, or its ids (EOS last).
        deadline: when it is given up wherever it is; 0: never.
        pieces: tell its text as it grows; False: all of it with its end, and of its steps only what ``Silent`` has.
    """

    id: str
    source: str | tuple[int, ...]
    options: RequestOptions
    arrived: float
    deadline: float = 0.0
    pieces: bool = True


@dataclass(frozen=True)
class Abort:
    """Forget a request; its ``Ended`` comes with the next step."""

    id: str


@dataclass(frozen=True)
class Stop:
    """Leave: at once, or (``drain``) when all that was submitted has ended."""

    drain: bool = True


# from the engine


@dataclass(frozen=True)
class ModelInfo:
    """What a client may know of the model that is served.

    Attributes:
        name: as requests call it.
        max_source, max_target: tokens; ``max_target`` is N.
        tolerances: by consistency, those for which a threshold below 1 or full depth is certified as it is served.
        measure: that the calibration picked; None without one.
        schedule: of layers, that it was trained by; None of other models.
        max_drafted: words of a draft, at most; 0 where the runner makes none.
        has_classifier: it has an exit classifier.
        about: further facts for /v1/models, JSON-ready.
    """

    name: str
    num_layers: int
    exit_layers: tuple[int, ...]
    vocab_size: int
    max_source: int
    max_target: int
    max_batch: int
    tolerances: dict[str, tuple[float, ...]]
    measure: str | None
    about: dict[str, Any]
    schedule: LayerSchedule | None = None
    max_drafted: int = 0
    has_classifier: bool = False


@dataclass(frozen=True)
class Ready:
    """The engine is warm and takes requests.

    Attributes:
        longest_step: seconds without a word from it that are nothing unusual, by what it measured.
    """

    info: ModelInfo
    longest_step: float = 0.0


@dataclass(frozen=True)
class Log:
    """A line for the server's log, and where it belongs in there: name and level as in ``logging``."""

    name: str
    level: int
    line: str


@dataclass(frozen=True)
class Failed:
    """There will be no engine: its process ends.

    Attributes:
        kind: name of the error's class.
        message: one line, for the server's operator; it may hold a path.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Refused:
    """A request that was not taken.

    Attributes:
        kind: name of the error's class: QueueFull, ConfigError, DataError, CalibrationError; CalmError where it is
            nothing that a client can mend.
        message: one line; it never holds the prompt.
    """

    id: str
    kind: str
    message: str


@dataclass(frozen=True)
class Spoke:
    """What one step brought one request.

    Attributes:
        text: what of the answer's text became final since the last one; may be empty.
        tokens, layers: ids and emission layers, in order.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A request's end; nothing follows.

    Attributes:
        text: what was not told by ``Spoke`` yet.
        drafted, accepted: words that its first layers drafted, and those of them that the whole stack said too; None
            of a request that drafts none.
        expired: its deadline passed.
        error: of status failed; one line without prompt, path or traceback.
    """

    id: str
    status: Status
    reason: Reason
    text: str
    prompt_tokens: int
    tokens: int
    certified: bool
    emission_layers: tuple[int, ...]
    executed_layers: tuple[int, ...]
    involuntary: int
    timing: Timing
    expired: bool = False
    error: str = ""
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class DriftState:
    """Whether certified answers are as deep as at calibration, over all certificates (serve/drift.py).

    Attributes:
        alarm: those of some certificate are not, or decode with a safer threshold because they were not.
        alarms: since the start.
        log_evidence: of the detector that has most; 0 without any, log(2 requests_per_alarm) raises the alarm.
    """

    alarm: bool = False
    alarms: int = 0
    log_evidence: float = 0.0


@dataclass(frozen=True)
class Load:
    """Where the engine stands after a step; sums are since its start.

    Attributes:
        steps: that it has taken; it grows as long as the engine is alive and has work.
        beat: when this was said: an idle engine says it once in a while.
        waiting: requests without a slot, those whose text is no ids yet among them.
        layers_executed: over all tokens; ``layers_skipped``: above their emission layers.
        backfilled_tokens: that were emitted below the last layer.
        rebatches: times that a row waited for company.
        blocks, blocks_used: of a decoder-only model's cache, each of one layer; 0 where rows have slots of their own.
        preemptions: times that a row gave its blocks up for an older one.
        preempted_bytes: of K and V of such rows that wait on the host.
    """

    beat: float
    steps: int
    running: int
    waiting: int
    parked: int
    layers_executed: int
    layers_skipped: int
    backfilled_tokens: int
    rebatches: int
    drift: DriftState = DriftState()
    blocks: int = 0
    blocks_used: int = 0
    preemptions: int = 0
    preempted_bytes: int = 0


@dataclass(frozen=True)
class Silent:
    """Tokens since the last batch of requests whose pieces nobody wants, for who counts.

    Attributes:
        layers: emission layer of each.
        gaps: seconds since the token before, of those that had one.
    """

    layers: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Everything of a step, and of those before it that brought nobody news: one hop for all rows."""

    events: tuple[Refused | Spoke | Ended, ...]
    load: Load
    silent: Silent = Silent()
