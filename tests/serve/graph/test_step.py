"""A step that asks the host nothing: the same tokens however it is run, launched ahead or not, and nothing moves."""

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calm.config import BatchRule, Head, Measure, RunnerName, Stepping, Weights
from calm.errors import ConfigError
from calm.policies import Policy, Static
from calm.rules import Rule
from serve import backend
from serve.engine import Engine
from serve.graph.program import Act
from serve.graph.stepping import stepper
from serve.measure import measure_check
from serve.options import EngineOptions, RequestOptions
from serve.requests import Answer, Status

from ..models import LENGTH, confident, engine_of, mixed_policies, policy_for, texts, tiny_served, usual

RULES = (BatchRule.own, BatchRule.compact, BatchRule.sync, BatchRule.quantile, BatchRule.lockstep)


def graph_engine(rule: BatchRule = BatchRule.own, **options: Any) -> Engine:
    return engine_of(rule, runner=RunnerName.graph, **options)


def by_name(engine: Engine, each: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Answer]:
    for name, (text, options) in each.items():
        engine.add_request(text, name=name, **options)
    return finished(engine)


def finished(engine: Engine) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    while engine.has_work:
        answers |= {answer.id: answer for answer in engine.step().answers}
    return answers


def said(answers: dict[str, Answer]) -> dict[str, Any]:
    return {name: (each.tokens, each.crossing_layers, each.emission_layers) for name, each in answers.items()}


def mixed(count: int = 12) -> dict[str, tuple[str, dict[str, Any]]]:
    kinds = list(mixed_policies())
    return {
        f"{kinds[n % len(kinds)]}-{n}": (
            texts(count)[n],
            {"policy": policy_for(kinds[n % len(kinds)], f"{kinds[n % len(kinds)]}-{n}", n), "max_tokens": 3 + n % 8},
        )
        for n in range(count)
    }


class NoLooking(TorchDispatchMode):
    """Nothing that hands a number of a tensor to the host, or makes a shape depend on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.value)
def test_a_step_looks_at_nothing_and_moves_nothing(rule: BatchRule) -> None:
    """What is captured must not read the device, and is replayed on the tensors that it was captured with."""
    engine = graph_engine(rule, max_batch=4)
    for text, measure in zip(
        texts(4), (Measure.softmax, Measure.state, Measure.agreement, Measure.entropy), strict=True
    ):
        engine.add_request(text, policy=confident(measure, usual(measure)), ignore_eos=True)
    for _ in range(4):  # two are encoded before a step
        engine.step()
    assert engine.num_running == 4
    machine = engine.machine
    program = machine.program(Rule(rule, 0.5), 4)
    assert len(program.asked) == 4
    places = {each.name: getattr(program.frame, each.name).data_ptr() for each in fields(program.frame)}
    with NoLooking(), torch.inference_mode():
        program.whole()
    finished(engine)
    assert places == {each.name: getattr(program.frame, each.name).data_ptr() for each in fields(program.frame)}


class Counted:
    """Stands for a capture: counts how often each piece is run."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, act: Act) -> Act:
        number = len(self.runs)
        self.runs.append(0)

        def run() -> None:
            self.runs[number] += 1
            act()

        return run


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_pieces_end_one_after_the_flag(depth: int) -> None:
    """The host looks at a layer's flag when the next layer is on its way already: at most one runs in vain."""
    engine = graph_engine(max_batch=2)
    for text in texts(2):
        engine.add_request(text, policy=Static(depth), max_tokens=3, ignore_eos=True)
    engine.step()
    program, pieces = engine.machine.program(Rule(BatchRule.own), 2), Counted()
    step = stepper(program, Stepping.segments, pieces)
    with torch.inference_mode():
        step()
    assert pieces.runs == [int(layer <= min(depth + 1, 4)) for layer in range(1, 5)] + [1]
    assert int(program.frame.layers) == depth and program.frame.said[2].tolist() == [depth, depth]


@pytest.mark.parametrize("stepping", [Stepping.whole, Stepping.segments])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.value)
def test_the_answers_are_the_eager_runner_s(rule: BatchRule, stepping: Stepping) -> None:
    asked = mixed()
    eager = said(by_name(engine_of(rule, runner=RunnerName.eager, max_batch=4, buckets=(4,)), asked))
    found = said(by_name(graph_engine(rule, max_batch=4, buckets=(4,), stepping=stepping), asked))
    assert found == eager
    assert len({layer for _, crossing, _ in found.values() for layer in crossing}) > 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact], ids=lambda rule: rule.value)
def test_steps_that_are_sent_ahead_change_nothing(rule: BatchRule, seed: int) -> None:
    """Rows come, go, end by EOS, are aborted and sampled beside each other; each says what it says by itself."""
    asked = mixed()
    asked["sampled"] = (texts(13)[12], {"temperature": 0.8, "seed": 5, "max_tokens": LENGTH})
    alone = {
        name: said(by_name(graph_engine(rule, max_batch=4, buckets=(4,)), {name: each}))[name]
        for name, each in asked.items()
    }
    engine, draw = graph_engine(rule, max_batch=4, buckets=(4,), overlap=True), random.Random(seed)
    coming, gone = draw.sample(sorted(asked), len(asked)), set()
    answers: dict[str, Answer] = {}
    while coming or engine.has_work:
        if coming and draw.random() < 0.6:
            name = coming.pop()
            engine.add_request(asked[name][0], name=name, **asked[name][1])
        if draw.random() < 0.05:
            gone |= {name for name in draw.sample(sorted(asked), 1) if engine.abort(name)}
        answers |= {answer.id: answer for answer in engine.step().answers}
    assert set(answers) == set(asked)
    for name, answer in answers.items():
        told = said({name: answer})[name]
        if name in gone:
            assert all(part == whole[: len(part)] for part, whole in zip(told, alone[name], strict=True))
        else:
            assert answer.status is Status.finished and told == alone[name]
    assert engine.slots.free == 4


def test_a_step_is_on_its_way_while_the_last_is_read() -> None:
    """So a row speaks one call later, and a row that ended ran once in vain."""
    engine = graph_engine(max_batch=2, overlap=True)
    sent: list[int] = []
    launch = engine.machine.launch

    def counted(rule: Rule, rows: Any, *others: Any) -> Any:
        sent.append(len(rows))
        return launch(rule, rows, *others)

    engine.machine.launch = counted
    engine.add_request(texts(1)[0], name="one", max_tokens=4, ignore_eos=True)
    told = []
    while engine.has_work:
        told.append(len(engine.step().tokens))
    assert told == [0, 1, 1, 1, 1] and sent == [1, 1, 1, 1]  # its last token is known by number: nothing in vain
    sent.clear()
    ended = next(text for text in texts(12) if len(engine_of(BatchRule.own).generate([text])[0].tokens) < LENGTH - 1)
    tokens = len(engine.generate([ended])[0].tokens)
    assert sum(sent) == tokens + 1


def test_what_it_does_not_offer_is_said() -> None:
    for options, line in (
        ({"rule": BatchRule.rebatch}, "rule=compact"),
        ({"head": Head.candidates}, "head=candidates needs runner=native or eager"),
        ({"weights": Weights.int8}, "needs runner=native"),
        ({"stepping": Stepping.branches}, "stepping=branches needs a GPU"),
    ):
        with pytest.raises(ConfigError, match=line):
            Engine(tiny_served(), EngineOptions(runner=RunnerName.graph, **options))
    assert backend.pick(RunnerName.auto, "cuda") is RunnerName.graph


def test_auto_chooses_among_the_rules_that_park_nobody() -> None:
    engine = Engine(tiny_served(), rule=BatchRule.auto, max_batch=2, runner=RunnerName.graph)
    assert {rule.name for rule in engine.turns.choice._candidates(2)} == {BatchRule.own, BatchRule.compact}
    answers = engine.generate(texts(4), policy=confident(Measure.state, usual(Measure.state)))
    assert all(answer.status is Status.finished for answer in answers)


def test_measuring_keeps_what_is_on_its_way_apart() -> None:
    policy: Policy = confident(Measure.softmax, usual(Measure.softmax))
    alone = graph_engine(max_batch=2).generate(texts(2), policy=policy)
    engine = graph_engine(max_batch=2, overlap=True)
    for number, text in enumerate(texts(2)):
        engine.add_request(text, RequestOptions(policy=policy), name=str(number))
    engine.step()
    entries = measure_check(engine.machine, frozenset({Measure.state}), repeats=1)
    assert entries and all(seconds >= 0 for sizes in entries.values() for seconds in sizes.values())
    answers = finished(engine)
    assert [answers[str(n)].tokens for n in range(2)] == [answer.tokens for answer in alone]
