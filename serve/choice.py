"""Which batch rule the next wave follows: the one of the options, or the one that the cost table finds cheapest.

``auto`` looks among own, compact and rebatch; ``rebatch`` with company 0 looks for its company. Both replay what the
engine's own rows did lately. Tokens never depend on it: all of these rules are row-exact, in whatever order they
follow each other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice

from calm.config import BatchRule, Measure
from calm.cost import CostTable, checking
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine

from .options import EngineOptions

PERIOD = 256  # steps between two decisions
WARM = 16  # steps before the first one
TOKENS = 12  # of each row that a decision replays
REMEMBERED = 2  # rows whose crossings are kept, for each of the batch

CheckCosts = Callable[[frozenset[Measure]], dict[str, dict[int, float]]]


def beside_parked(rule: Rule, parked: bool) -> Rule:
    """The rule itself, or while rows are parked the one that may follow ``rebatch`` in its place.

    Parked rows have mates that left: they go on under a rule that lets rows leave, or what they are said to have run
    would be wrong. So until nobody is parked ``compact`` stands in for ``own``: it takes parked rows in where it meets
    them and parks nobody.
    """
    return replace(rule, name=BatchRule.compact) if parked and not rule.leaves else rule


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
        self._seen: OrderedDict[Hashable, deque[int]] = OrderedDict()  # crossings by row, who spoke last at the end
        self._steps = 0
        self._due = WARM
        self._current: BatchRule = BatchRule.own if options.rule is BatchRule.auto else options.rule
        self._company = options.company

    @staticmethod
    def decides(options: EngineOptions) -> bool:
        """Whether these options leave something to decide."""
        return options.rule is BatchRule.auto or (options.rule is BatchRule.rebatch and not options.company)

    def saw(self, crossings: Iterable[int], rows: Iterable[Hashable] | None = None) -> None:
        """Crossing layers of the rows that spoke in a step, and who they are; None: known by their places."""
        if self.table is None:
            return
        self._steps += 1
        layers = list(crossings)
        for row, layer in zip(range(len(layers)) if rows is None else rows, layers, strict=True):
            self._seen.setdefault(row, deque(maxlen=TOKENS)).append(layer)
            self._seen.move_to_end(row)
        while len(self._seen) > REMEMBERED * self._options.max_batch:
            self._seen.popitem(last=False)

    def rule(self, running: int, parked: bool, measures: Iterable[Measure] = ()) -> Rule:
        """The rule of the next wave, for so many rows of these measures, some of which may be parked."""
        if self.table is not None and self._steps >= self._due and sum(map(len, self._seen.values())) >= running:
            self._due = self._steps + PERIOD
            chosen = self.cheapest(running, frozenset(measures))
            self._current, self._company = chosen.name, chosen.company
        company = self._company or max(1, running // 4)  # before anything was seen: a quarter
        return beside_parked(Rule(self._current, self._options.quantile, company, self._options.max_age), parked)

    def cheapest(self, running: int, measures: frozenset[Measure]) -> Rule:
        """The candidate that the replay of what was seen takes the least time for, by the present table."""
        assert self.table is not None
        if checking(measures) not in self.table.seconds:
            self.table = self.table.plus(self._check_costs(measures))
        traces = self._traces(running, measures)
        return min(self._candidates(running), key=lambda rule: self._seconds(rule, traces))  # the first of equals

    def _candidates(self, running: int) -> list[Rule]:
        if self._setting.one_piece:  # it can park nobody
            return [Rule(BatchRule.own), Rule(BatchRule.compact)]
        company = self._options.company
        companies = [company] if company else sorted({max(2, running // share) for share in (8, 4, 2)})
        waiting = [Rule(BatchRule.rebatch, company=each, max_age=self._options.max_age) for each in companies]
        if self._options.rule is BatchRule.rebatch:
            return waiting
        return [Rule(BatchRule.own), Rule(BatchRule.compact), *waiting]

    def _traces(self, running: int, measures: frozenset[Measure]) -> list[Trace]:
        """What so many rows would do: those that said most lately, each of which goes on as it did."""
        latest = list(self._seen.values())[::-1]
        known = sorted(latest, key=len, reverse=True)[:running]  # the latest of equals first
        rows = islice(cycle(known), running)
        return [Trace(tuple(islice(cycle(history), TOKENS)), measures=measures) for history in rows]

    def _seconds(self, rule: Rule, traces: Sequence[Trace]) -> float:
        assert self.table is not None
        engine = SimEngine(self.table, self._setting, rule)
        engine.place(traces)
        while engine.has_work:
            engine.step()
        return engine.now
