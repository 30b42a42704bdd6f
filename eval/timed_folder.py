"""A trained folder's articles, answered to their ends by ways of decoding that take turns."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from calm.config import BatchRule, Consistency, DataConfig, Device, Head, Measure, RunnerName
from calm.engine_config import SERVED_DTYPES, ServingConfig, served_numbers
from calm.errors import CalibrationError, DataError
from calm.metrics import with_median

from .clocks import Contender, Paired, Rounds, paired, until_quiet
from .common import choose_model, say
from .serving_cells import load_of
from .sessions import FULL, Session, session_of
from .workload import LIVE, Entry, Workload, engine_options, folder_workload

if TYPE_CHECKING:
    from calm.calibration import Artifact
    from calm.drafting import Draft
    from calm.policies import Policy
    from serve.accounting import StepRecord
    from serve.engine import Engine
    from serve.requests import Answer

FOREMOST = ("int8", *(each for each in SERVED_DTYPES if each != "int8"))  # dtype that is taken where several fit


class Timed(Rounds, Protocol):
    """Settings that programs which time a folder's articles have in common."""

    checkpoint: str | None
    data: DataConfig | None
    n: int
    tolerance: float
    measure: Measure | None
    dtype: str | None
    threads: int
    seed: int


def open_timed(config: Timed) -> Workload:
    """The folder's articles and the policy of one measure; says what is decoded, and at which threshold.

    Raises:
        CheckpointError, DataError: of the folder and its corpus.
        CalibrationError: nothing below 1 is certified for the tolerance.
    """
    import torch

    from calm.calibration import load_artifacts

    torch.set_num_threads(config.threads)
    folder = choose_model(config.checkpoint)
    measure, dtype = certified_way(load_artifacts(folder), folder, config.tolerance, config.measure, config.dtype)
    workload = folder_workload(serving_config(config, measure, dtype), folder)
    if not workload.articles:
        raise DataError(f"the test split of {workload.about['corpus']} is empty")
    for line in workload.notes:
        say(f"note: {line}")
    threshold = workload.about["thresholds"][measure.value]["threshold"]
    certified = workload.about["thresholds"][measure.value]["certified_for"]
    word = "not certified as it is decoded here" if certified is None else f"certified for tolerance {certified:g}"
    say(f"{measure.value} in {dtype} at threshold {threshold}, {word}")
    workload.about |= {"measure": measure.value, "dtype": dtype}
    return workload


def serving_config(config: Timed, measure: Measure, dtype: str) -> ServingConfig:
    return ServingConfig(
        checkpoint=config.checkpoint, data=config.data, n=config.n, tolerance=config.tolerance, measures=[measure],
        dtype=dtype, device=Device.cpu, threads=config.threads, repeats=config.repeats, warmups=config.warmups,
        attempts=config.attempts, allow_noisy=config.allow_noisy, few=1, many=2, seed=config.seed,
    )  # fmt: skip


def certified_way(
    artifacts: "Sequence[Artifact]",
    folder: Path,
    tolerance: float,
    measure: Measure | None = None,
    dtype: str | None = None,
) -> tuple[Measure, str]:
    """Measure and dtype for which this machine's engine has a threshold below 1: those asked for; without a measure the
    one that dev picked, without a dtype int8 before fp32 before bf16.

    Raises:
        CalibrationError: there is none.
    """
    for numbers in [dtype] if dtype else FOREMOST:
        fitting = [
            each
            for each in artifacts
            if _fits(each, numbers, folder)
            and measure in (None, each.measure)
            and any(isclose(c.tolerance, tolerance) and c.certified_below_one for c in each.certificates)
        ]
        if fitting:
            return next((each for each in fitting if each.picked(tolerance)), fitting[0]).measure, numbers
    asked = " ".join([measure.value if measure else "any measure", *filter(None, [dtype])])
    raise CalibrationError(
        f"{folder}: nothing below 1 is certified for risk tolerance {tolerance:g} ({asked}) as it is decoded "
        "here; run python -m eval.calibrate, or give another tolerance=, measure= or dtype="
    )


def _fits(artifact: "Artifact", dtype: str, folder: Path) -> bool:
    """Whether it speaks of answers by this processor's own runner with the full head."""
    from calm.calibration.identity import arithmetic
    from calm.models.folder import is_decoder_only
    from serve.backend import pick, runner_kernels

    runner = pick(RunnerName.auto, "cpu", decoder_only=is_decoder_only(folder))
    if dtype == "int8" and runner is not RunnerName.native:
        return False
    numbers, weights = served_numbers(dtype)
    computed = arithmetic(numbers, runner, weights, kernels=runner_kernels(runner, "cpu"))
    asked = (computed, Head.full.value, Consistency.risk)
    return (artifact.identity.dtype, artifact.identity.head, artifact.consistency) == asked


def exit_entry(workload: Workload, rule: BatchRule) -> Entry:
    """Exits of the folder's measure under a rule."""
    measure, head = next(iter(workload.policies))
    return Entry(rule.value, "exit", head, rule, measure, LIVE)


def plain_entry(depth: int | None = None) -> Entry:
    """Full depth, or a static one."""
    if depth is None:
        return Entry(FULL, FULL, Head.full)
    return Entry(f"static {depth}", "static", Head.full, depth=depth)


def timed_engine(workload: Workload, most: int, threads: int, **asked: Any) -> "Engine":
    """``asked``: of ``Workload.engine``."""
    return own_clock(workload.engine(most, **asked), threads)


def own_clock(engine: "Engine", threads: int) -> "Engine":
    """The engine, whose own clock leaves out what others took of the processor, where one thread works."""
    if threads == 1:
        engine.clock.now = time.thread_time
    return engine


def clock_name(threads: int) -> str:
    """What the engine's own clock counts."""
    return "processor time of the thread" if threads == 1 else "wall clock"


@dataclass(frozen=True)
class Round:
    """All articles once.

    Attributes:
        seconds: by phase of the engine's clock (serve.accounting), of all steps.
        row_layers: rows of each layer that ran, summed.
        layers: mean layer that gave a token.
    """

    session: Session
    seconds: Mapping[str, float]
    steps: int
    row_layers: int
    layers: float

    @property
    def decoding(self) -> float:
        """Seconds without the encoder's."""
        return sum(self.seconds.values()) - self.seconds.get("prefill", 0.0)

    @property
    def decode_tokens_per_s(self) -> float:
        return self.session.tokens / self.decoding


def round_of(answers: "Sequence[Answer]", records: "Sequence[StepRecord]") -> Round:
    """Raise CalmError for an answer that failed."""
    session, seconds = session_of(answers), dict[str, float]()
    for record in records:
        for phase, spent in record.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return Round(
        session,
        seconds,
        steps=sum(record.tokens > 0 for record in records),
        row_layers=sum(sum(record.layers) for record in records),
        layers=sum(sum(answer.emission_layers) for answer in answers) / session.tokens,
    )


@dataclass
class Turns:
    """A way of decoding on its engine; answers the first ``n`` sources and remembers what all of them brought.

    ``policy`` None with a ``draft``: full depth, speculatively.
    """

    engine: "Engine"
    sources: Sequence[list[int]]
    policy: "Policy | None"
    draft: "Draft | None" = None
    rounds: list[Round] = field(default_factory=list)
    answers: "list[Answer]" = field(default_factory=list)

    def __call__(self, n: int) -> None:
        history: deque[StepRecord] = deque()  # the engine's own forgets after 4096 steps
        self.engine.clock.history = history
        asked = {"policy": self.policy} if self.draft is None else {"draft": self.draft}
        answers = self.engine.generate(self.sources[:n], **asked)
        if n == len(self.sources):
            self.answers = answers
            self.rounds.append(round_of(answers, history))

    @property
    def rates(self) -> dict[str, list[float]]:
        """Of every round: tokens a second with all included, and by the engine's own clock without the encoder."""
        return {
            "tokens_per_s": [each.session.tokens_per_s for each in self.rounds],
            "decode_tokens_per_s": [each.decode_tokens_per_s for each in self.rounds],
        }


def rate_ratios(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Of rows with ``Turns.rates``: ``decode_tokens_ratio`` and ``tokens_ratio``, medians and their intervals."""
    found: dict[str, float] = {}
    for clock in ("decode_tokens", "tokens"):
        each = [a / b for a, b in zip(mine[f"{clock}_per_s"], other[f"{clock}_per_s"], strict=True)]
        found |= with_median(f"{clock}_ratio", each)
    return found


def turns_of(entry: Entry, engine: "Engine", workload: Workload) -> Turns:
    """An entry of a folder's workload, over its articles."""
    sources = [workload.model.to_ids(each.source) for each in workload.articles]
    return Turns(engine, sources, workload.policy(entry, []))


def in_turns(ways: Mapping[str, Turns], config: Rounds) -> Paired:
    """Every way answers all articles, in turn, the first of them twice in a round; leaves each its counted rounds.

    ``few`` and ``many`` of the clock are articles here, one and all.

    Raises:
        CalmError: the machine stays noisy through all attempts and that is not allowed.
        DataError: there is one article only.
    """
    first = next(iter(ways.values()))
    everything = len(first.sources)
    if everything < 2:
        raise DataError("one article cannot be timed; give n=2 or more")

    def attempt() -> Paired:
        for turns in ways.values():
            turns.rounds.clear()
        found = paired(
            [Contender(name, turns) for name, turns in ways.items()], 1, everything, config.repeats, config.warmups,
            allow_noisy=None, load=load_of(config.allow_noisy),
        )  # fmt: skip
        for turns in ways.values():  # neither warm-ups count nor the second turn of the first
            each = 2 if turns is first else 1
            turns.rounds = turns.rounds[each * config.warmups :: each]
        return found

    return until_quiet(config, attempt)


def about_timed(workload: Workload) -> dict[str, Any]:
    """What a record says of the model and its articles."""
    from calm.calibration.identity import code_version, hash_rows
    from serve.backend import decoding_identity

    identity = decoding_identity(workload.model, engine_options(workload.config, workload.config.head))
    return {
        **workload.about,
        "identity": None if identity is None else identity.to_json(),
        "rows_hash": hash_rows(workload.articles),
        "code": code_version(),
        "notes": workload.notes,
    }
