"""Which batch rule the next wave follows: the one of the options, or the one that the cost table finds cheapest.

``auto`` looks among own, compact and rebatch; ``rebatch`` with company 0 looks for its company. Both replay what the
engine's own rows did lately. Tokens never depend on it: all of these rules are row-exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from calm.config import BatchRule, Measure
from calm.cost import CostTable, checking
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine

from .options import EngineOptions

PERIOD = 256  # steps between two decisions
WARM = 16  # steps before the first one
TOKENS = 12  # of each row that a decision replays

CheckCosts = Callable[[frozenset[Measure]], dict[str, dict[int, float]]]


class RuleChoice:
    """The rule of an engine's options, wave by wave.

    Args:
        table: cost table of the engine; None where the options leave nothing to decide.
        check_costs: measures the checks of a set of measures that the table lacks.
    """

    def __init__(
        self, options: EngineOptions, setting: Setting, table: CostTable | None, check_costs: CheckCosts
    ) -> None:
        self._options, self._setting = options, setting
        self.table = table if self.decides(options) else None
        self._check_costs = check_costs
        self._seen: deque[int] = deque(maxlen=TOKENS * options.max_batch)
        self._steps = 0
        self._due = WARM
        self._current: BatchRule = BatchRule.own if options.rule is BatchRule.auto else options.rule
        self._company = options.company

    @staticmethod
    def decides(options: EngineOptions) -> bool:
        """Whether these options leave something to decide."""
        return options.rule is BatchRule.auto or (options.rule is BatchRule.rebatch and not options.company)

    def saw(self, crossings: Iterable[int]) -> None:
        """Crossing layers of the rows of a step, in their order."""
        if self.table is not None:
            self._steps += 1
            self._seen.extend(crossings)

    def rule(self, running: int, parked: bool, measures: Iterable[Measure] = ()) -> Rule:
        """The rule of the next wave, for so many rows of these measures; while rows are parked it does not change."""
        if self.table is not None and not parked and self._steps >= self._due and len(self._seen) >= running:
            self._due = self._steps + PERIOD
            chosen = self.cheapest(running, frozenset(measures))
            self._current, self._company = chosen.name, chosen.company
        company = self._company or max(1, running // 4)  # before anything was seen: a quarter
        return Rule(self._current, self._options.quantile, company, self._options.max_age)

    def cheapest(self, running: int, measures: frozenset[Measure]) -> Rule:
        """The candidate that the replay of what was seen takes the least time for, by the present table."""
        assert self.table is not None
        if checking(measures) not in self.table.seconds:
            self.table = self.table.plus(self._check_costs(measures))
        traces = self._traces(running, measures)
        return min(self._candidates(running), key=lambda rule: self._seconds(rule, traces))  # the first of equals

    def _candidates(self, running: int) -> list[Rule]:
        company = self._options.company
        companies = [company] if company else sorted({max(2, running // share) for share in (8, 4, 2)})
        waiting = [Rule(BatchRule.rebatch, company=each, max_age=self._options.max_age) for each in companies]
        if self._options.rule is BatchRule.rebatch:
            return waiting
        return [Rule(BatchRule.own), Rule(BatchRule.compact), *waiting]

    def _traces(self, running: int, measures: frozenset[Measure]) -> list[Trace]:
        """What so many rows would do: each takes every so-manieth crossing, as rows speak in turn."""
        seen = list(self._seen)
        length = min(TOKENS, len(seen) // running)
        seen = seen[len(seen) - length * running :]
        return [Trace(tuple(seen[i::running]), measures=measures) for i in range(running)]

    def _seconds(self, rule: Rule, traces: Sequence[Trace]) -> float:
        assert self.table is not None
        engine = SimEngine(self.table, self._setting, rule)
        engine.place(traces)
        while engine.has_work:
            engine.step()
        return engine.now
