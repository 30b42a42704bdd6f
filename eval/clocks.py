"""Clocks for things that are to be compared: in turn, in pairs, and not on a machine that does something else.

A contender decodes n tokens for its whole batch. Each round every contender does so for few and for many tokens, one
after the other: A B A B. Clock ``decode`` is what one more step takes, (t_many - t_few) / (many - few), which leaves
encoder and start out; clock ``call`` is t_many. A ratio is the median over the rounds of that round's ratio, so what
disturbs a round disturbs both. The first contender is the baseline and is measured twice: how far it is from itself
(A/A) says what a ratio is worth here.
"""

import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from calm.errors import CalmError, ConfigError

logger = logging.getLogger(__name__)

LIMIT = 0.05  # of foreign CPU, and of the A/A pair's distance from 1
AGAIN = " (again)"
_IDLE = ("idle", "iowait")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class Clocked(str, Enum):
    """What of a run is compared."""

    decode = "decode"
    call = "call"


@dataclass(frozen=True)
class Contender:
    """``run(n)`` decodes n tokens for the whole batch, from its sources to its answers."""

    name: str
    run: Callable[[int], object]


@dataclass(frozen=True)
class Load:
    """CPU seconds since the machine was started.

    Attributes:
        busy: of all cores, whoever had them; what a hypervisor took is busy too.
        own: of this process, its children and the processes that were named.
        cores: that ``busy`` counts.
    """

    busy: float
    own: float
    cores: int


class ReadLoad(Protocol):
    def __call__(self) -> Load: ...


class ProcLoad:
    """Reads /proc.

    Args:
        pids: processes that work for this one without being its children, such as a server under test.

    Raises:
        CalmError: there is no /proc that can be read.
    """

    def __init__(self, pids: Collection[int] = (), root: Path = Path("/proc"), own: int | None = None) -> None:
        self._root, self._pids = root, frozenset(pids)
        self._own = os.getpid() if own is None else own
        self._tick = os.sysconf("SC_CLK_TCK")

    def __call__(self) -> Load:
        try:
            lines = (self._root / "stat").read_text().splitlines()
            ours = self._ours()
        except (OSError, ValueError, IndexError) as error:
            raise CalmError(
                f"{self._root}/stat cannot be read ({error}), so nobody can tell whether the machine was busy; "
                "time on Linux, or mark the record with allow_noisy=true"
            ) from None
        whole = dict(zip(_FIELDS, map(int, lines[0].split()[1:]), strict=False))
        busy = sum(value for name, value in whole.items() if name not in _IDLE)
        cores = sum(line.startswith("cpu") and line[3].isdigit() for line in lines)
        return Load(busy / self._tick, ours / self._tick, cores)

    def _ours(self) -> int:
        """Ticks of our processes; those of children that have ended count with their parents."""
        parents, ticks = {}, {}
        for folder in self._root.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                values = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(folder.name)] = int(values[1])
            ticks[int(folder.name)] = sum(map(int, values[11:15]))  # utime stime cutime cstime
        ours = {self._own, *self._pids}
        while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
            ours |= more
        return sum(count for pid, count in ticks.items() if pid in ours)


@dataclass(frozen=True)
class Noise:
    """How much the machine did beside a measurement.

    Attributes:
        foreign: CPU of others as a share of all cores.
        again: per clock, the median ratio of the baseline to itself; empty where only the machine was looked at.
    """

    foreign: float
    again: dict[Clocked, float] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        return not (self.foreign <= LIMIT and all(abs(ratio - 1.0) <= LIMIT for ratio in self.again.values()))

    def check(self, allow_noisy: bool = False) -> None:
        """Raise CalmError on a noisy machine, unless that is allowed."""
        if not self.noisy:
            return
        if allow_noisy:
            logger.warning("noisy machine: %s; the record says noisy: true", self.told())
            return
        raise CalmError(
            f"this machine is too busy to time anything: {self.told()}; stop what else runs and try again, "
            "or give allow_noisy=true, which marks the record as noisy"
        )

    def told(self) -> str:
        """Both figures and their limits."""
        figures = f"others had {self.foreign:.1%} of its CPU (limit {LIMIT:.0%})"
        if not self.again:
            return figures
        ratios = ", ".join(f"{clock.value} {ratio:.3f}" for clock, ratio in self.again.items())
        return f"{figures} and the baseline against itself is {ratios} (limit {LIMIT:.0%} from 1)"

    def to_json(self) -> dict[str, Any]:
        again = {clock.value: ratio for clock, ratio in self.again.items()}
        return {"foreign_cpu": self.foreign, "again": again, "noisy": self.noisy, "limit": LIMIT}


@dataclass(frozen=True)
class Sample:
    """Seconds of one contender in one round."""

    few: float
    many: float


@dataclass(frozen=True)
class Paired:
    """What ``paired`` found.

    Attributes:
        samples: by contender, in the order of the rounds; the baseline's second entry is called ``NAME (again)``.
    """

    few: int
    many: int
    baseline: str
    samples: dict[str, tuple[Sample, ...]]
    noise: Noise

    def seconds(self, name: str, clock: Clocked) -> list[float]:
        """Of each round. Raises ConfigError for a name that did not take part."""
        try:
            samples = self.samples[name]
        except KeyError:
            raise ConfigError(f"{name!r} was not timed; there are {', '.join(self.samples)}") from None
        if clock is Clocked.call:
            return [sample.many for sample in samples]
        return [(sample.many - sample.few) / (self.many - self.few) for sample in samples]

    def median(self, name: str, clock: Clocked) -> float:
        return statistics.median(self.seconds(name, clock))

    def speedup(self, name: str, over: str, clock: Clocked) -> float:
        """How many times as fast ``name`` is as ``over``: the median of over's seconds by name's, round by round."""
        return median_ratio(self.seconds(over, clock), self.seconds(name, clock))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the rounds' ratios; NaN where a round has no time to compare.

    That is so where many tokens took no longer than few: a clock that is coarser than the work, or noise.
    """
    if any(not value > 0.0 for value in (*above, *below)):
        return float("nan")
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def turns(contenders: Sequence[Contender]) -> list[Contender]:
    """One round's order: the baseline first, and again amid the others: A B A B."""
    first, others = contenders[0], list(contenders[1:])
    middle = (len(others) + 1) // 2
    return [first, *others[:middle], Contender(first.name + AGAIN, first.run), *others[middle:]]


def paired(
    contenders: Sequence[Contender],
    few: int,
    many: int,
    repeats: int,
    warmups: int = 1,
    *,
    allow_noisy: bool | None = False,
    now: Callable[[], float] = time.perf_counter,
    load: ReadLoad | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Paired:
    """Time all contenders in turn.

    Args:
        contenders: the baseline first.
        few, many: tokens of the two runs.
        repeats: rounds that count; ``warmups`` before them do not.
        allow_noisy: None leaves it to the caller to look at the noise.
        load: what the machine does; default: /proc, with nobody's processes but our own.
        tick: called after every contender's turn.

    Raises:
        ConfigError: no contender, two of one name, or numbers out of range.
        CalmError: the machine was noisy and that is not allowed.
    """
    _check(contenders, few, many, repeats, warmups)
    order, load = turns(contenders), load or ProcLoad()
    samples: dict[str, list[Sample]] = {each.name: [] for each in order}
    for _ in range(warmups):
        for each in order:
            each.run(few)
            each.run(many)
            tick()
    before, began = load(), now()
    with uncollected() as collect:
        for _ in range(repeats):
            for each in order:
                start = now()
                each.run(few)
                between = now()
                each.run(many)
                samples[each.name].append(Sample(between - start, now() - between))
                collect()
                tick()
    foreign = foreign_share(before, load(), now() - began)
    found = Paired(few, many, order[0].name, {name: tuple(row) for name, row in samples.items()}, Noise(foreign))
    again = {clock: found.speedup(order[0].name + AGAIN, order[0].name, clock) for clock in Clocked}
    noise = Noise(foreign, again)
    if allow_noisy is not None:
        noise.check(allow_noisy)
    return Paired(few, many, found.baseline, found.samples, noise)


@contextmanager
def uncollected() -> Iterator[Callable[[], object]]:
    """Python's garbage collector stays out of what is timed: gives what collects between two turns.

    Its pauses are long in a program that holds much, and would fall on some way by chance.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


class Rounds(Protocol):
    """Of a config: how often ways take turns."""

    repeats: int
    warmups: int
    attempts: int
    allow_noisy: bool


def until_quiet(rounds: Rounds, attempt: Callable[[], Paired]) -> Paired:
    """The first attempt that nobody disturbed, or the last; with ``allow_noisy`` the first.

    Args:
        attempt: times everything once more, with ``allow_noisy=None``.

    Raises:
        CalmError: the machine stays noisy through all attempts and that is not allowed.
    """
    found: Paired | None = None
    for _ in range(rounds.attempts):
        found = attempt()
        if not found.noise.noisy or rounds.allow_noisy:
            break
    assert found is not None
    found.noise.check(rounds.allow_noisy)
    return found


def _check(contenders: Sequence[Contender], few: int, many: int, repeats: int, warmups: int) -> None:
    names = [each.name for each in contenders]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"contenders must have names of their own and there must be one at least, got {names}")
    if not 1 <= few < many:
        raise ConfigError(f"the two runs need 1 <= few < many tokens, got few={few}, many={many}")
    if repeats < 1 or warmups < 0:
        raise ConfigError(f"repeats must be at least 1 and warmups at least 0, got {repeats} and {warmups}")


def foreign_share(before: Load, after: Load, seconds: float) -> float:
    """CPU that others had between two readings, as a share of all cores; 0 where it is less than our own."""
    others = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, others) / max(seconds * after.cores, 1e-9)


def look(
    seconds: float = 1.0,
    load: ReadLoad | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Noise:
    """What the machine does while we do nothing: to refuse a busy one before an hour was spent on it."""
    load = load or ProcLoad()
    before, began = load(), now()
    sleep(seconds)
    return Noise(foreign_share(before, load(), now() - began))
