"""The cells of the serving run: every way of decoding a batch, timed in turn on the same engine and machine."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from calm.config import BatchRule, Head, Measure
from calm.errors import CalmError

from .clocks import Clocked, Contender, Load, Noise, Paired, ProcLoad, ReadLoad, foreign_share, paired, until_quiet
from .common import say
from .sessions import FULL, Session, neighbours, session_of
from .workload import Entry, Workload

if TYPE_CHECKING:
    from calm.cost import CostTable
    from calm.rules import Rule
    from calm.sim_rows import Setting, Trace
    from serve.engine import Engine
    from serve.requests import Answer

SIMULATED = (BatchRule.own, BatchRule.compact, BatchRule.sync, BatchRule.lockstep)


@dataclass
class Runs:
    """An entry on its engine; remembers what its calls brought."""

    entry: Entry
    engine: "Engine"
    workload: Workload
    sources: list[list[int]]
    many: int
    answers: "list[Answer]" = field(default_factory=list)
    served: "list[Answer]" = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    def __call__(self, tokens: int) -> None:
        """One batch, each answer of exactly so many tokens."""
        names = [f"r{i}" for i in range(len(self.sources))]
        policy = self.workload.policy(self.entry, names)
        found = self.engine.generate(self.sources, names=names, policy=policy, max_tokens=tokens, ignore_eos=True)
        if tokens == self.many:
            self.answers = found
            self.sessions.append(session_of(found))

    def serve(self) -> Session:
        """All articles, each to its EOS, as many at once as the batch has rows."""
        articles = self.workload.articles
        policy = self.workload.policy(self.entry, [])
        self.served = self.engine.generate([self.workload.model.to_ids(a.source) for a in articles], policy=policy)
        return session_of(self.served)

    def rouge_l(self) -> dict[str, float]:
        """Mean ROUGE-L to the references of the articles that were served, and its 95 % interval."""
        from calm.metrics import rouge_l_many, with_interval

        articles = self.workload.articles
        scores = rouge_l_many([answer.text for answer in self.served], [article.target for article in articles])
        return with_interval("rouge_l", scores, self.workload.config.seed)

    def depth(self, clock: Clocked) -> float:
        """Mean crossing layer of the tokens that a clock sees of the last whole call."""
        first = self.workload.few if clock is Clocked.decode else 0
        layers = [layer for answer in self.answers for layer in answer.crossing_layers[first:]]
        return sum(layers) / len(layers)

    def skipped(self) -> dict[str, float]:
        """Shares of layers, and how deep tokens went: of the articles where there are any, else of the last batch."""
        num_layers = self.workload.num_layers

        def mean(name: str) -> float:
            layers: list[int] = [layer for answer in self.served or self.answers for layer in getattr(answer, name)]
            return sum(layers) / len(layers)

        crossing, emission, executed = (mean(f"{name}_layers") for name in ("crossing", "emission", "executed"))
        return {
            "mean_crossing": crossing,
            "mean_emission": emission,
            "mean_executed": executed,
            "layers_skipped": 1.0 - emission / num_layers,
            "layers_not_run": 1.0 - executed / num_layers,
        }


class Cell:
    """One batch size and source length: an engine for each rule, everything timed in turn."""

    def __init__(self, workload: Workload, batch: int, source_tokens: int | None) -> None:
        self.workload, self.batch = workload, batch
        self.sources = workload.sources(batch, source_tokens)
        self.source_tokens = source_tokens or round(statistics.median(map(len, self.sources)))
        self._engines: dict[tuple[BatchRule, Head], Engine] = {}
        entries = workload.entries()
        self.runs = {entry.name: self._runs(entry) for entry in entries}
        self._add_static()

    @property
    def runner(self) -> str:
        """Which of eager and native ran."""
        return self.engine().runner_name.value

    def engine(self, rule: BatchRule = BatchRule.own, head: Head | None = None) -> "Engine":
        """Of this rule and head."""
        key = rule, head or self.workload.config.head
        if key not in self._engines:
            self._engines[key] = self.workload.engine(self.batch, *key)
        return self._engines[key]

    def _runs(self, entry: Entry) -> Runs:
        return Runs(entry, self.engine(entry.rule, entry.head), self.workload, self.sources, self.workload.many)

    def _add_static(self) -> None:
        """The whole depths on both sides of each exit's mean, which one run of it tells; of a folder half depth too."""
        depths = {max(1, self.workload.num_layers // 2)} if self.workload.trained else set[int]()
        for runs in [runs for runs in self.runs.values() if runs.entry.role == "exit"]:
            runs(self.workload.many)
            for clock in Clocked:
                depths |= set(neighbours(runs.depth(clock)))
        for depth in sorted(depths - {self.workload.num_layers}):
            entry = Entry(f"static-{depth}", "static", self.workload.config.head, depth=depth)
            self.runs[entry.name] = self._runs(entry)

    def measure(self, tick: Callable[[], object] = lambda: None) -> Paired:
        """Raise CalmError where the machine stays noisy through all attempts and that is not allowed."""
        config, few, many = self.workload.config, self.workload.few, self.workload.many
        contenders = [Contender(name, runs) for name, runs in self.runs.items()]

        def attempt() -> Paired:
            for runs in self.runs.values():
                runs.sessions.clear()
            found = paired(
                contenders, few, many, config.repeats, config.warmups, allow_noisy=None, tick=tick,
                load=load_of(config.allow_noisy),
            )  # fmt: skip
            for runs in self.runs.values():  # warm-ups do not count, nor the baseline's second turn
                turns = 2 if runs.entry.role == FULL else 1
                runs.sessions = runs.sessions[turns * config.warmups :]
            return found

        return until_quiet(config, attempt)

    def serve(self) -> tuple[dict[str, list[Session]], Noise]:
        """Sessions over all articles, in turn; raises CalmError as ``measure`` does."""
        config, sessions = self.workload.config, {name: list[Session]() for name in self.runs}
        load = load_of(config.allow_noisy)
        before, began = load(), time.perf_counter()
        for _ in range(config.repeats):
            for name, runs in self.runs.items():
                sessions[name].append(runs.serve())
        noise = Noise(foreign_share(before, load(), time.perf_counter() - began))
        noise.check(config.allow_noisy)
        return sessions, noise

    def cost_table(self, head: Head) -> "CostTable | None":
        """Of this cell's engine with a head; None where that cannot be measured, which is said."""
        from serve.measure import measure

        entries = [each for each in self.workload.entries() if each.head is head]
        asked = sorted({e.measure for e in entries if e.measure is not None}, key=lambda m: m.value)
        try:
            lengths = [len(source) for source in self.sources]
            return measure(self.engine(head=head), 3, [{each} for each in asked], lengths)
        except CalmError as error:
            say(f"no cost table: {error}")
            return None

    def predicted(self, table: "CostTable", runs: Runs, clock: Clocked) -> float | None:
        """Seconds of the clock by table and simulator; None under a rule that the engine chooses."""
        from calm.rules import Rule
        from calm.sim_rows import Trace
        from calm.simulate import SimEngine
        from serve.measure import setting_of

        if runs.entry.rule not in SIMULATED:
            return None
        asked = frozenset[Measure]() if runs.entry.measure is None else frozenset({runs.entry.measure})
        setting, rule = setting_of(runs.engine), Rule(runs.entry.rule)

        few, many = self.workload.few, self.workload.many
        traces = [
            Trace(answer.crossing_layers[:many], len(source), measures=asked, fills=runs.entry.depth is None)
            for answer, source in zip(runs.answers, self.sources, strict=True)
        ]
        if clock is Clocked.call:
            return SimEngine(table, setting, rule).run(traces).seconds
        return decode_step(table, setting, rule, traces, few, many)


def decode_step(
    table: "CostTable", setting: "Setting", rule: "Rule", traces: "Sequence[Trace]", few: int, many: int
) -> float:
    """Seconds by table and simulator of a step of these rows: what their tokens from few to many take."""
    from calm.simulate import SimEngine

    def seconds(tokens: int) -> float:
        cut = [replace(trace, depths=trace.depths[:tokens]) for trace in traces]
        return SimEngine(table, setting, rule).run(cut).seconds

    return (seconds(many) - seconds(few)) / (many - few)


def load_of(allow_noisy: bool) -> ReadLoad:
    """/proc; where it cannot be read and noise is allowed, nobody is seen there."""
    reader = ProcLoad()
    if allow_noisy:
        try:
            reader()
        except CalmError:
            return lambda: Load(0.0, 0.0, 1)
    return reader
