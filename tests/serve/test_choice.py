"""Which rule is picked: hand-made costs with an obvious answer, and the engine that follows the choice."""

from collections.abc import Callable

import pytest

import serve.choice
from calm.config import BatchRule, Measure, RunnerName
from calm.cost import CostTable, backfilling
from calm.policies import Replay
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine
from serve.choice import PERIOD, TOKENS, WARM, RuleChoice, beside_parked
from serve.engine import Engine
from serve.measure import setting_of
from serve.options import EngineOptions
from tests.serve.models import confident, depths_of, texts, tiny_served, usual

LAYERS = 4
ROWS = 8
LADDER = EngineOptions(max_batch=ROWS).ladder
Cost = Callable[[int], float]


def table_of(layer: Cost, *, pack: float = 0.0, step: float = 0.0, layers: int = LAYERS) -> CostTable:
    """Layers as the batch size says; ``pack``: of every packing; ``step``: of every wave's set-up, head and so on."""
    packing = dict.fromkeys(("pack", "join", "merge", "part"), pack)
    other = dict.fromkeys(("check", "stay", "head", "read", *map(backfilling, range(1, layers))), 0.0)
    seconds = {name: dict.fromkeys(LADDER, cost) for name, cost in {**packing, **other, "start": step}.items()}
    seconds |= {name: {bucket: layer(bucket) for bucket in LADDER} for name in ("layer", "layer_gathered")}
    seconds |= {name: {1: 0.0} for name in ("admit", "end", "move", "step", "row")}
    seconds["encode"] = {16: 0.0}
    return CostTable(seconds)


def by_rows(bucket: int) -> float:
    return float(bucket)


def alike(bucket: int) -> float:
    return 1.0


def choice_of(
    rule: BatchRule, table: CostTable | None, company: int = 0, asked: list[frozenset[Measure]] | None = None
) -> RuleChoice:
    def check_costs(measures: frozenset[Measure]) -> dict[str, dict[int, float]]:
        assert asked is not None, "nothing is to be measured"
        asked.append(measures)
        names = ("check:softmax", "first_check:softmax", "early_head")
        return {name: dict.fromkeys(LADDER, 0.0) for name in names}

    setting = Setting(LAYERS, LADDER, frozenset(range(1, LAYERS)))
    options = EngineOptions(rule=rule, company=company, max_batch=ROWS)
    return RuleChoice(options, setting, table, check_costs)


def settled(choice: RuleChoice, crossings: list[int], steps: int = WARM) -> Rule:
    """What is chosen after so many steps with these crossings."""
    for _ in range(steps):
        choice.saw(crossings)
    return choice.rule(len(crossings), parked=False)


MIXED = [1, 1, 1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("table", "crossings", "expected"),
    [
        (table_of(by_rows, step=1.0), MIXED, BatchRule.compact),  # every row that leaves saves its share
        (table_of(by_rows, pack=100.0), MIXED, BatchRule.own),  # letting rows out costs more than it saves
        (table_of(alike, pack=0.001, step=1.0), MIXED, BatchRule.own),  # nothing is saved by a smaller batch
        (table_of(by_rows, step=1.0), [4] * ROWS, BatchRule.own),  # nobody ever leaves
        (table_of(alike, pack=0.01), [1] * 6 + [1, 4], BatchRule.rebatch),  # a deep layer for one costs that for all
    ],
)
def test_the_cheapest_rule_is_picked(table: CostTable, crossings: list[int], expected: BatchRule) -> None:
    # who is deep changes from token to token, or parked rows would meet no company
    choice = choice_of(BatchRule.auto, table)
    for step in range(WARM):
        choice.saw(crossings[step % ROWS :] + crossings[: step % ROWS])
    assert choice.rule(ROWS, parked=False).name is expected
    again = choice_of(BatchRule.auto, table)
    for step in range(WARM):
        again.saw(crossings[step % ROWS :] + crossings[: step % ROWS])
    assert again.rule(ROWS, parked=False) == choice.rule(ROWS, parked=False)


def test_company_is_picked_by_cost() -> None:
    """Where a layer costs the same for any batch, the more company the better; where rows pay, waiting wins nothing."""
    crossings = [1, 1, 1, 1, 1, 1, 1, 4]

    def company(table: CostTable) -> int:
        choice = choice_of(BatchRule.rebatch, table)
        for step in range(WARM):
            choice.saw(crossings[step % ROWS :] + crossings[: step % ROWS])
        rule = choice.rule(ROWS, parked=False)
        assert rule.name is BatchRule.rebatch
        return rule.company

    assert company(table_of(alike)) == 4
    assert company(table_of(by_rows, step=5.0)) == 2


def test_nothing_is_decided_before_enough_was_seen() -> None:
    for rule, expected in ((BatchRule.auto, BatchRule.own), (BatchRule.rebatch, BatchRule.rebatch)):
        choice = choice_of(rule, table_of(by_rows, step=1.0))
        assert settled(choice, MIXED, WARM - 1) == Rule(expected, 0.5, ROWS // 4, 8)
    assert settled(choice_of(BatchRule.auto, table_of(by_rows, step=1.0)), MIXED).name is BatchRule.compact


def test_rows_that_are_parked_hinder_no_decision() -> None:
    """Under steady arrivals somebody is always parked."""
    for rule in (BatchRule.auto, BatchRule.rebatch):
        choice = choice_of(rule, table_of(by_rows, step=1.0))
        before = choice.rule(ROWS, parked=True)
        for _ in range(WARM):
            choice.saw(MIXED)
        after = choice.rule(ROWS, parked=True)
        assert after == choice.rule(ROWS, parked=True) and before.leaves and after.leaves
        assert after.name is (BatchRule.compact if rule is BatchRule.auto else BatchRule.rebatch)
        assert choice._due == WARM + PERIOD


def test_while_rows_are_parked_compact_stands_in_for_own() -> None:
    choice = choice_of(BatchRule.auto, table_of(by_rows, pack=100.0))
    assert settled(choice, MIXED).name is BatchRule.own
    stand_in = choice.rule(ROWS, parked=True)
    assert stand_in.name is BatchRule.compact and not stand_in.waits
    assert choice.rule(ROWS, parked=False).name is BatchRule.own
    for name in (BatchRule.compact, BatchRule.rebatch):
        assert beside_parked(Rule(name), parked=True) == Rule(name)


def test_decisions_follow_what_was_seen_lately() -> None:
    choice = choice_of(BatchRule.auto, table_of(by_rows, step=1.0))
    assert settled(choice, MIXED).name is BatchRule.compact
    assert settled(choice, [4] * ROWS, PERIOD - 1).name is BatchRule.compact  # not due yet
    assert settled(choice, [4] * ROWS, 1).name is BatchRule.own


def test_a_decision_replays_the_rows_that_run_now() -> None:
    choice = choice_of(BatchRule.auto, table_of(by_rows, step=1.0))
    for _ in range(WARM):
        choice.saw([1, 4, 2])
    traces = choice._traces(3, frozenset({Measure.state}))
    assert sorted(trace.depths for trace in traces) == [(1,) * TOKENS, (2,) * TOKENS, (4,) * TOKENS]
    assert all(trace.measures == {Measure.state} for trace in traces)
    assert choice.rule(1, parked=False).name is BatchRule.own  # alone there is nothing to choose


def test_what_is_replayed_was_done_by_one_row() -> None:
    """Rows speak in the order in which they left, which is no row's; short rows go on as they did."""
    choice = choice_of(BatchRule.auto, table_of(by_rows, step=1.0))
    choice.saw([3], ["old"])
    for turn in range(TOKENS):
        said = [("even", 1 + turn % 2), ("odd", 2 - turn % 2), ("deep", 4), *([("new", 3)] if turn > 9 else [])]
        choice.saw(*zip(*sorted((layer, row) for row, layer in said), strict=True))
    by_row = {trace.depths for trace in choice._traces(3, frozenset())}
    assert by_row == {(1, 2) * (TOKENS // 2), (2, 1) * (TOKENS // 2), (4,) * TOKENS}
    assert {trace.depths for trace in choice._traces(4, frozenset())} == {*by_row, (3,) * TOKENS}
    assert len(choice._traces(11, frozenset())) == 11
    choice.saw([1] * 2 * ROWS, range(2 * ROWS))
    assert len(choice._seen) == 2 * ROWS and "old" not in choice._seen and "deep" not in choice._seen


def test_checks_that_the_table_lacks_are_measured_once() -> None:
    asked: list[frozenset[Measure]] = []
    choice = choice_of(BatchRule.auto, table_of(by_rows, step=1.0), asked=asked)
    for _ in range(2 * PERIOD):
        choice.saw(MIXED)
        choice.rule(ROWS, False, [Measure.softmax])
    assert asked == [{Measure.softmax}]


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.sync, BatchRule.quantile])
def test_a_given_rule_is_a_given_rule(rule: BatchRule) -> None:
    choice = choice_of(rule, CostTable({}))
    assert not RuleChoice.decides(EngineOptions(rule=rule)) and choice.table is None
    assert settled(choice, MIXED, 2 * WARM).name is rule
    given = choice_of(BatchRule.rebatch, None, company=3)
    assert settled(given, MIXED, 2 * WARM) == Rule(BatchRule.rebatch, 0.5, 3, 8)


# the engine


SOURCES = [*texts(12), *texts(12, seed=8)]


def often_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.choice, "WARM", 1)
    monkeypatch.setattr(serve.choice, "PERIOD", 6)


def never(measures: frozenset[Measure]) -> dict[str, dict[int, float]]:
    raise AssertionError("nothing is to be measured")


def played(rule: BatchRule, table: CostTable | None, **named: object) -> tuple[list, list, Engine]:
    engine = Engine(
        tiny_served(), rule=rule, max_batch=ROWS, costs=table, poison=True, runner=RunnerName.eager, **named
    )
    for number, text in enumerate(SOURCES):
        name = f"r{number}"
        engine.add_request(text, name=name, policy=Replay({name: depths_of(number)}), ignore_eos=True)
    answers, records = {}, []
    while engine.has_work:
        step = engine.step()
        answers |= {answer.id: (answer.tokens, answer.emission_layers) for answer in step.answers}
        records.append(step.record)
    return [answers[name] for name in sorted(answers)], records, engine


def test_auto_changes_the_rule_and_never_a_token() -> None:
    expected, _, _ = played(BatchRule.own, None)
    answers, records, _ = played(BatchRule.auto, table_of(by_rows, step=1.0))
    assert answers == expected
    rules = [record.rule for record in records]
    assert rules == [BatchRule.own] * WARM + [BatchRule.compact] * (len(rules) - WARM)
    assert len(rules) > WARM + 2
    assert played(BatchRule.auto, table_of(by_rows, pack=100.0))[1][-1].rule is BatchRule.own


class ToAndFro(RuleChoice):
    """Decides for another rule every time."""

    def cheapest(self, running: int, measures: frozenset[Measure]) -> Rule:
        self.turn = getattr(self, "turn", 0) + 1
        names = (BatchRule.rebatch, BatchRule.own, BatchRule.rebatch, BatchRule.compact)
        return Rule(names[self.turn % 4] if self._options.rule is BatchRule.auto else BatchRule.rebatch, company=4)


def test_auto_and_rebatch_decide_while_rows_wait_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a decision due every few steps."""
    often_decided(monkeypatch)
    expected, _, _ = played(BatchRule.own, None)
    monkeypatch.setattr("serve.engine.RuleChoice", ToAndFro)
    answers, records, _ = played(BatchRule.auto, table_of(alike), max_age=3)
    assert answers == expected
    assert {record.rule for record in records} >= {BatchRule.own, BatchRule.compact, BatchRule.rebatch}
    pairs = list(zip(records, records[1:], strict=False))
    assert any(before.parked and after.rule is not before.rule for before, after in pairs)
    assert not any(before.parked and after.rule is BatchRule.own for before, after in pairs)
    assert played(BatchRule.rebatch, table_of(alike, step=0.1))[0] == expected


@pytest.mark.parametrize("rule", [BatchRule.auto, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_a_simulation_decides_as_the_engine_does(rule: BatchRule, monkeypatch: pytest.MonkeyPatch) -> None:
    often_decided(monkeypatch)
    monkeypatch.setattr("serve.engine.RuleChoice", ToAndFro)
    table = table_of(alike, pack=0.05, step=0.3)
    _, records, engine = played(rule, table, max_age=3)
    simulated = SimEngine(table, setting_of(engine), ToAndFro(engine.options, setting_of(engine), table, never))
    for number, text in enumerate(SOURCES):
        ids = engine.model.to_ids(text)
        simulated.add(Trace(depths_of(number), len(ids), key=str(ids)))
    foretold = []
    while simulated.has_work:
        foretold.append(simulated.step())
    essence = [(step.rule, step.rows, step.layers, step.parked) for step in foretold]
    assert essence == [(record.rule, record.rows, record.layers, record.parked) for record in records]
    assert sum(step.parked for step in foretold) and len({step.layers for step in foretold}) > 3


def test_the_engine_measures_by_itself_and_once_for_a_model() -> None:
    model = tiny_served(seed=3)
    policy = confident(Measure.softmax, usual(Measure.softmax))
    expected = [answer.tokens for answer in Engine(model, max_batch=4).generate(texts(), policy=policy)]
    assert not model.costs  # a given rule needs no table
    engine = Engine(model, rule=BatchRule.auto, max_batch=4, poison=True)
    (table,) = model.costs.values()
    assert engine.turns.choice.table is table and table.at("layer", 4) > 0.0
    assert [answer.tokens for answer in engine.generate([*texts(), *texts()], policy=policy)] == expected * 2
    assert engine.clock.steps > WARM and "check:softmax" in engine.turns.choice.table.seconds
    measuring = [record.seconds["measuring"] for record in engine.clock.history if "measuring" in record.seconds]
    assert len(measuring) == 1 and measuring[0] > 0.0  # a phase of its own, of the one step that decided
    Engine(model, rule=BatchRule.rebatch, max_batch=4)
    assert list(model.costs.values()) == [table]
    Engine(model, rule=BatchRule.rebatch, max_batch=4, company=2)
    Engine(model, rule=BatchRule.rebatch, max_batch=2)
    assert len(model.costs) == 2
