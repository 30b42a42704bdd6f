"""The simulator by itself: sums that can be done by hand (against the engine: tests/serve/test_cost_engine.py)."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from calm.config import BatchRule, Measure
from calm.cost import CostTable, backfilling
from calm.errors import ConfigError
from calm.rules import Rule
from calm.sim_rows import Setting, Trace, traces_of
from calm.simulate import SimEngine

LAYERS = 4
SETTING = Setting(num_layers=LAYERS, buckets=(1, 2, 4), checked=frozenset({1, 2, 3}), max_source=64)
OWN, COMPACT = Rule(BatchRule.own), Rule(BatchRule.compact)


def table_of(**given: float | dict[int, float]) -> CostTable:
    """Nothing costs anything but what is given, at every size or by size."""
    names = [
        "start",
        "layer",
        "layer_gathered",
        "check",
        "check:softmax",
        "first_check:softmax",
        "stay",
        "pack",
        "join",
    ]
    names += ["merge", "part", "head", "early_head", "read", *map(backfilling, range(1, LAYERS))]
    sizes = dict.fromkeys((1, 2, 4), 0.0)
    once = {name: {1: 0.0} for name in ("admit", "end", "move", "step", "row")}
    seconds = {**{name: sizes for name in names}, **once, "encode": dict.fromkeys((16, 32), 0.0)}
    for name, cost in given.items():
        name = name.replace("backfill_", "backfill:")
        seconds[name] = cost if isinstance(cost, dict) else dict.fromkeys(seconds[name], cost)
    return CostTable(seconds)


def test_own_runs_everybody_until_the_last_has_crossed() -> None:
    table = table_of(layer={1: 1.0, 2: 1.5, 4: 2.0})
    done = SimEngine(table, SETTING, OWN).run([Trace((1, 3)), Trace((2, 1)), Trace((3, 4))])
    assert [step.layers for step in done.steps] == [(4, 4, 4), (4, 4, 4, 4)]
    assert done.executed == [(3, 4), (3, 4), (3, 4)]
    assert done.emission == [(1, 3), (2, 1), (3, 4)]
    assert done.seconds == 7 * 2.0 and done.tokens_per_second == 6 / 14


def test_compact_packs_what_is_left() -> None:
    table = table_of(layer=1.0, layer_gathered={1: 0.25, 2: 0.5, 4: 9.0}, pack=0.125, part=0.0625, merge=0.5)
    done = SimEngine(table, SETTING, COMPACT).run([Trace((1,)), Trace((2,)), Trace((4,)), Trace((4,))])
    assert [step.layers for step in done.steps] == [(4, 4, 2, 2)]
    assert done.executed == done.emission == [(1,), (2,), (4,), (4,)]
    # the first layer in place, then three rows of a bucket of four, then two
    assert done.steps[0].seconds["layers"] == 1.0 + 9.0 + 2 * 0.5
    assert done.steps[0].seconds["packing"] == 2 * 0.125 + 0.5 + 3 * 0.0625


def test_a_batch_coupled_rule_speaks_from_where_it_stops() -> None:
    free = table_of()
    rows = [Trace((1,)), Trace((3,))]
    assert SimEngine(free, SETTING, Rule(BatchRule.sync)).run(rows).emission == [(3,), (3,)]
    half = SimEngine(free, SETTING, Rule(BatchRule.quantile, share=0.5)).run([*rows, Trace((4,)), Trace((2,))])
    assert half.emission == [(1,), (2,), (2,), (2,)]


def test_backfill_costs_what_the_lowest_row_lacks() -> None:
    table = table_of(backfill_1=1.0, backfill_2=20.0, backfill_3=300.0)
    assert SimEngine(table, SETTING, OWN).run([Trace((1,)), Trace((3,))]).seconds == 1.0  # all ran three layers
    assert SimEngine(table, SETTING, COMPACT).run([Trace((1,)), Trace((3,))]).seconds == 300.0


def test_checks_cost_by_measure_and_by_whether_they_are_the_first() -> None:
    table = table_of(**{"check": 1.0, "check:softmax": 10.0, "first_check:softmax": 100.0})
    assert SimEngine(table, SETTING, OWN).run([Trace((4,))]).seconds == 4.0
    asked = Trace((4,), measures=frozenset({Measure.softmax}))
    assert SimEngine(table, SETTING, OWN).run([asked]).seconds == 100.0 + 10.0 + 10.0 + 1.0  # layer L is no exit
    with pytest.raises(ConfigError, match="first_check:state"):
        SimEngine(table, SETTING, OWN).run([Trace((4,), measures=frozenset({Measure.state}))])


def test_without_packing_a_check_costs_by_the_rows_that_are_asked() -> None:
    sizes = {"first_check:softmax": {1: 1.0, 2: 10.0, 3: 100.0}, "check:softmax": {1: 2.0, 2: 20.0, 3: 200.0}}
    free = table_of(check=0.5).seconds
    table = CostTable({name: {**each, 3: max(each.values())} for name, each in free.items()}).plus(sizes)
    setting = replace(SETTING, buckets=(1, 2, 3), packed=False)
    softmax = frozenset({Measure.softmax})
    rows = [Trace((1,), measures=softmax), Trace((4,), measures=softmax), Trace((4,))]

    def checks(rule: Rule) -> float:
        return SimEngine(table, setting, rule).run(rows).steps[0].seconds["checks"]

    # after layer 1 two rows; after 2 and 3 the one that has not crossed; after 4 nobody
    assert checks(OWN) == checks(COMPACT) == 10.0 + 2.0 + 2.0 + 0.5
    assert checks(Rule(BatchRule.sync)) == 10.0 + 20.0 + 20.0 + 0.5  # nobody is held where it crossed


def test_the_early_head_needs_every_row_to_leave_early() -> None:
    table = table_of(head=10.0, early_head=1.0)
    asked = frozenset({Measure.softmax})
    for depths, cost in [((2, 3), 1.0), ((2, 4), 10.0)]:
        rows = [Trace((depth,), measures=asked) for depth in depths]
        assert SimEngine(table, SETTING, OWN).run(rows).seconds == cost
    assert SimEngine(table, SETTING, OWN).run([Trace((2,)), Trace((3,))]).seconds == 10.0


def test_requests_come_when_they_come() -> None:
    table = table_of(layer=1.0)
    rows = [Trace((2, 2), arrived=10.0), Trace((4,), arrived=0.0), Trace((1,), arrived=11.0)]
    done = SimEngine(table, SETTING, OWN).run(rows)
    assert [step.layers for step in done.steps] == [(1, 1, 1, 1), (1, 1), (2, 2)]
    assert [row.ended for row in done.rows] == [14.0, 4.0, 14.0] and done.seconds == 14.0
    assert [row.number for row in done.rows] == [1, 0, 2]
    assert [row.first_token for row in done.rows] == [12.0, 4.0, 14.0]
    assert done.inner_token_latency == 2.0 / 4


def test_prefill_is_bounded_and_a_known_source_is_free() -> None:
    setting = Setting(num_layers=LAYERS, buckets=(1, 2, 4), checked=frozenset(), prefill_rows=2, prefill_calls=1)
    table = table_of(encode={16: 1.0, 32: 2.0}, admit=0.25)
    rows = [Trace((4,) * 3, 5), Trace((4,) * 3, 20, key="same"), Trace((4,) * 3, 16), Trace((4,) * 3, 20, key="same")]
    done = SimEngine(table, setting, OWN).run(rows)
    assert [(step.admitted, step.encoder_calls) for step in done.steps[:3]] == [(2, 1), (2, 1), (0, 0)]
    assert sum(step.seconds.get("prefill", 0.0) for step in done.steps) == 1.0 + 2.0 + 4 * 0.25
    later = SimEngine(table, setting, OWN).run([rows[1], Trace((4,), 20, arrived=1.0, key="same")])
    assert later.steps[1].admitted == 1 and later.steps[1].encoder_calls == 0


def test_the_host_and_the_slots_cost_too() -> None:
    table = table_of(step=1.0, row=0.125, end=10.0, move=100.0)
    done = SimEngine(table, SETTING, OWN).run([Trace((4,)), Trace((4, 4))])
    assert [step.seconds["host"] for step in done.steps] == [1.25, 1.125]
    assert [step.seconds["slots"] for step in done.steps] == [10.0 + 100.0, 10.0]
    assert done.seconds == pytest.approx(sum(step.total for step in done.steps))


def test_rows_that_wait_for_company_are_told_of() -> None:
    rule = Rule(BatchRule.rebatch, company=2, max_age=8)
    done = SimEngine(table_of(), SETTING, rule).run([Trace((1, 1)), Trace((4,)), Trace((1, 4))])
    assert max(step.parked for step in done.steps) == 1
    assert [row.parked for row in done.rows] == [0, 1, 0]  # the third row's last token is its company
    assert done.executed == [(1, 1), (4,), (1, 4)]


def test_rows_may_be_placed_without_admission() -> None:
    engine = SimEngine(table_of(admit=1.0, encode=1.0, layer=0.5), SETTING, OWN)
    engine.place([Trace((2,)), Trace((2,))])
    assert engine.step().admitted == 0 and not engine.has_work
    assert engine.now == 1.0


class Picky:
    """``own`` for the first wave, then ``compact``."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, frozenset[Measure]]] = []
        self.seen: list[list[int]] = []

    def rule(self, running: int, parked: bool, measures: Iterable[Measure]) -> Rule:
        self.asked.append((running, parked, frozenset(measures)))
        return OWN if len(self.asked) == 1 else COMPACT

    def saw(self, crossings: Iterable[int], rows: Iterable[object]) -> None:
        self.seen.append(list(crossings))


def test_who_picks_the_rule_is_asked_before_every_wave_and_told_after_it() -> None:
    picky, softmax = Picky(), frozenset({Measure.softmax})
    done = SimEngine(table_of(), SETTING, picky).run([Trace((1, 1), measures=softmax), Trace((3, 3))])
    assert picky.asked == [(2, False, softmax)] * 2
    assert picky.seen == [[1, 3], [1, 3]]
    assert [row.executed for row in done.rows] == [[3, 1], [3, 3]]
    assert [step.rule for step in done.steps] == [BatchRule.own, BatchRule.compact]


def test_kept_sources_are_bounded_by_their_tokens() -> None:
    """Sources of 20 and 16 tokens do not fit into 30, so each of them is encoded whenever it comes again."""
    table = table_of(encode=1.0)
    for most, calls in ((None, 2), (40, 2), (30, 4)):
        setting = replace(SETTING, prefill_rows=1, prefill_calls=9, cross_cache_tokens=most)
        rows = [Trace((4,), length, arrived=float(i), key=str(length)) for i, length in enumerate((20, 16, 20, 16))]
        done = SimEngine(table, setting, OWN).run(rows)
        assert sum(step.encoder_calls for step in done.steps) == calls, most


def test_recorded_rows_become_requests() -> None:
    recorded = [SimpleNamespace(crossing_layers=(1, 2)), SimpleNamespace(crossing_layers=())]
    assert traces_of(recorded, [Measure.state], 9) == [Trace((1, 2), 9, measures=frozenset({Measure.state}))]
