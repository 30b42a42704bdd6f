"""Requests come, step, are aborted and end in any order: no slot leaks, nobody starves, everybody ends exactly once."""

import os
import random
import time
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from calm.config import BatchRule
from serve.engine import Engine, Step
from serve.errors import QueueFull
from serve.model import served
from serve.native.wave import NativeWave
from serve.options import RequestOptions
from serve.requests import Answer, Reason, Status
from tests.scripted import early_exit, random_t5

from .models import COUPLED, EXACT, LENGTH, engine_of, mixed_policies, policy_for, rows
from .near_ties import Tally, told

pytestmark = pytest.mark.usefixtures("each_runner")

MAX_BATCH, MAX_WAITING, PREFILL_ROWS = 4, 6, 2
SETTINGS = settings(
    max_examples=10,
    stateful_step_count=25,
    phases=(Phase.generate,),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Requests(RuleBasedStateMachine):
    """Drives one engine; ``batch_rule`` is set by the subclass that a test makes, and what else it drives by others."""

    batch_rule = BatchRule.own
    length = LENGTH
    kinds = sorted(mixed_policies())
    preempted = 0  # rows that may wait beside those that were never seated
    policy_for = staticmethod(policy_for)
    told = staticmethod(told)

    def make(self, **options: Any) -> Engine:
        return engine_of(self.batch_rule, **options)

    def text(self, source: int) -> str:
        return rows()[source].source

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.make(
            quantile=0.5,
            company=3,
            max_batch=MAX_BATCH,
            max_waiting=MAX_WAITING,
            prefill_rows=PREFILL_ROWS,
            prefill_calls=1,
            source_multiple=4,
            cross_cache_rows=2,
        )
        self.tally = Tally()
        self.asked: dict[str, tuple[int, str, int]] = {}
        self.open: dict[str, int] = {}  # name -> steps that it may still take
        self.aborted: set[str] = set()
        self.ended: set[str] = set()

    @rule(source=st.integers(0, 11), turn=st.integers(0, 10**6), limit=st.integers(1, LENGTH))
    def add(self, source: int, turn: int, limit: int) -> None:
        name, kind = f"r{len(self.asked)}", self.kinds[turn % len(self.kinds)]
        ahead = self.engine.num_waiting + self.engine.num_running
        options: dict[str, Any] = dict(policy=self.policy_for(kind, name, source), max_tokens=limit, name=name)
        if self.engine.num_waiting >= MAX_WAITING:
            with pytest.raises(QueueFull):
                self.engine.add_request(self.text(source), **options)
            return
        self.engine.add_request(self.text(source), **options)
        self.asked[name] = (source, kind, limit)
        # a token may wait for company for max_age waves, and for the waves that are as old; then for those ahead
        self.open[name] = (ahead + 1) * self.length * (2 + MAX_BATCH) + 5

    @precondition(lambda self: self.open)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: random.Random) -> None:
        waiting = sorted(row.id for wave in self.engine.turns.parked for row in wave.rows)
        name = choice.choice(waiting or sorted(self.open))
        assert self.engine.abort(name) is (name not in self.aborted)
        self.aborted.add(name)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.see(self.engine.step())

    def see(self, step: Step) -> None:
        for name in self.open:
            self.open[name] -= 1
            assert self.open[name] > 0, f"{name} starves"
        for name, _ in step.tokens:
            assert name in self.open and name not in self.aborted
        for answer in step.answers:
            del self.open[answer.id]
            self.ended.add(answer.id)
            self.judge(answer)

    def judge(self, answer: Answer) -> None:
        source, kind, limit = self.asked[answer.id]
        assert answer.status is (Status.cancelled if answer.id in self.aborted else Status.finished)
        lengths = {len(answer.crossing_layers), len(answer.emission_layers), len(answer.executed_layers)}
        assert lengths == {len(answer.tokens)} and len(answer.tokens) <= limit
        if self.batch_rule in EXACT:
            self.tally.compare(answer, self.told(source, kind), limit=limit)

    @invariant()
    def slots_are_those_of_the_running_rows(self) -> None:
        engine, running = self.engine, self.engine._running
        assert sorted(row.slot for row in running) == sorted(engine.slots.taken)
        assert all(row.status is Status.running for row in running)
        assert all(row.status is Status.waiting and row.slot == -1 for row in engine._waiting)
        unheard = {row.id for row in engine._ended}
        assert {row.id for row in running} | {row.id for row in engine._waiting} | unheard == set(self.open)
        assert engine.num_waiting <= MAX_WAITING + self.preempted

    @invariant()
    def free_slots_have_no_policy(self) -> None:
        exits = self.engine._exits
        for slot in {*range(MAX_BATCH + 1)} - self.engine.slots.taken:
            assert exits.thresholds[slot].isinf().all()
            assert not exits.depths[slot].any()
            assert exits.measures[slot] == -1 and exits.run_lengths[slot] == 0
        present = {
            (int(exits.measures[row.slot]), int(exits.run_lengths[row.slot]))
            for row in self.engine._running
            if exits.measures[row.slot] >= 0
        }
        assert len(present) == len(exits.present)

    @invariant()
    def rows_that_wait_for_company_keep_their_slots(self) -> None:
        parked = [row for wave in self.engine.turns.parked for row in wave.rows]
        assert len({row.id for row in parked}) == len(parked)
        assert {row.id for row in parked} <= {row.id for row in self.engine._running}
        for wave in self.engine.turns.parked:
            native = isinstance(wave, NativeWave)
            slots = wave._memory.active if native else wave.at.slots.tolist()
            assert wave.rows and slots[: wave.size] == [row.slot for row in wave.rows]
            assert 1 <= wave.layer < 4 and not (wave._memory.view.done_count if native else wave.aside)

    def teardown(self) -> None:
        while self.engine.has_work:
            self.see(self.engine.step())
            self.slots_are_those_of_the_running_rows()
        assert self.ended == set(self.asked) and not self.open
        assert not self.engine.slots.taken and not self.engine._rows and not self.engine.turns.parked
        assert self.tally.ties == 0
        self.free_slots_have_no_policy()


@pytest.mark.parametrize("batch_rule", [*EXACT, *COUPLED], ids=lambda each: each.value)
def test_requests_come_and_go_in_any_order(batch_rule: BatchRule) -> None:
    machine = type("RequestsOf" + batch_rule.value.title(), (Requests,), {"batch_rule": batch_rule})
    run_state_machine_as_test(machine, settings=SETTINGS)


def small_engine(batch_rule: BatchRule = BatchRule.rebatch) -> Engine:
    model = served(early_exit(random_t5(d_model=16, encoder_layers=1, seed=1), length=8))
    return engine_of(batch_rule, model, quantile=0.5, max_batch=16, prefill_rows=8, max_waiting=64, cross_cache_rows=16)


def random_options(draw: random.Random, name: str) -> RequestOptions:
    """Any kind of policy; half of them sampled, stopped by strings and ids, held up, or deaf to EOS."""
    kind = draw.choice(sorted(mixed_policies()))
    asked: dict[str, Any] = dict(policy=policy_for(kind, name, draw.randrange(12)), max_tokens=draw.randint(1, 3))
    if draw.random() < 0.25:
        asked |= dict(temperature=draw.choice([0.3, 1.0, 5.0]), top_p=draw.choice([0.2, 0.9, 1.0]))
    if draw.random() < 0.25:
        asked |= dict(stop=(f"w{draw.randint(1, 9)}", f"{draw.randint(0, 9)} w"), stop_ids={draw.randrange(97)})
    if draw.random() < 0.25:
        asked |= dict(min_tokens=draw.randint(1, asked["max_tokens"]), ignore_eos=draw.random() < 0.5)
    return RequestOptions(**asked)


def as_asked(answer: Answer, options: RequestOptions) -> bool:
    """Whether an answer's status and length are among those that its options allow."""
    if answer.status is Status.cancelled:
        return len(answer.tokens) <= 3
    least, most = max(1, options.min_tokens), options.max_tokens or 0
    length = len(answer.tokens)
    if answer.status is not Status.finished or not least <= length <= most:
        return False
    match answer.reason:
        case Reason.length:
            return length == most
        case Reason.eos:
            return answer.tokens[-1] == 1 and not options.ignore_eos
        case _:
            return bool(options.stop)


def churn(engine: Engine, draw: random.Random, requests: int) -> int:
    """So many random requests, some of them aborted; how many answers came, of which each is as it was asked."""
    answered = sent = 0
    alive: dict[str, RequestOptions] = {}
    while sent < requests or engine.has_work:
        while sent < requests and engine.num_waiting < 32:
            source = " ".join(f"w{draw.randrange(3, 97)}" for _ in range(draw.randint(1, 6)))
            name = f"r{sent}"
            alive[name] = random_options(draw, name)
            engine.add_request(source, alive[name], name=name)
            sent += 1
        for _ in range(draw.randint(0, 4)):
            engine.abort(draw.choice(list(alive) or ["nobody"]))
        for answer in engine.step().answers:
            assert as_asked(answer, alive.pop(answer.id)), answer
            answered += 1
    assert not alive
    return answered


def pool_is_as_it_was(engine: Engine) -> bool:
    exits = engine._exits
    assert not engine._rows and not engine.turns.parked and not engine._ended and not engine._running
    assert exits.thresholds.isinf().all() and not exits.depths.any() and (exits.measures == -1).all()
    return engine.slots.free == 16 and not engine.slots.taken and not exits.present and len(engine.cross_cache) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("batch_rule", [*EXACT, *COUPLED], ids=lambda each: each.value)
def test_ten_thousand_requests_leave_the_pool_as_it_was(batch_rule: BatchRule) -> None:
    """So many by all the rules together; most of them by the one under which rows wait for company."""
    engine, requests = small_engine(batch_rule), 4000 if batch_rule is BatchRule.rebatch else 1000
    assert churn(engine, random.Random(0), requests) == requests
    assert pool_is_as_it_was(engine)


@pytest.mark.parametrize("batch_rule", [BatchRule.rebatch, BatchRule.quantile], ids=lambda each: each.value)
def test_hundreds_of_requests_leave_the_pool_as_it_was(batch_rule: BatchRule) -> None:
    engine = small_engine(batch_rule)
    assert churn(engine, random.Random(1), 200) == 200
    assert pool_is_as_it_was(engine)


@pytest.mark.not_graph
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_is_flat_under_load() -> None:
    """For CALM_SOAK_S seconds (default 20): after a warm-up the process does not grow."""
    seconds = float(os.environ.get("CALM_SOAK_S", "20"))
    engine, draw, process = small_engine(), random.Random(2), psutil.Process()
    began, requests = time.monotonic(), 0
    while time.monotonic() - began < seconds / 4 or requests < 2000:
        requests += churn(engine, draw, 200)
    before = process.memory_info().rss
    while time.monotonic() - began < seconds or requests < 4000:
        requests += churn(engine, draw, 200)
    grown = (process.memory_info().rss - before) / 2**20
    print(f"{requests} requests, {grown:.1f} MiB grown after warm-up")
    assert grown < 8
