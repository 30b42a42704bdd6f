"""The candidate head in whole engines, against the rule written out row by row."""

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from calm.config import BatchRule, Head, Measure
from calm.data.text import encode_source
from calm.decode_batch import BatchDecoder
from calm.models.t5 import EarlyExitT5
from calm.models.t5_adapter import T5Adapter
from calm.policies import Confident, Full, Policy, Static
from calm.records import Example
from serve.engine import Engine
from serve.requests import Answer
from tests.scripted import early_exit, examples, random_t5

from . import models
from .models import COUPLED, EXACT, LENGTH, VOCABULARY, confident

pytestmark = [pytest.mark.usefixtures("each_runner"), pytest.mark.not_graph]
LAYERS, K = 5, 4
ROWS = examples(VOCABULARY, 7, seed=5)
CONFIDENT = [
    confident(Measure.softmax, 0.05),
    confident(Measure.softmax, 0.3),
    confident(Measure.softmax, 0.7),
    confident(Measure.max_prob, 0.5),
    confident(Measure.entropy, 0.45),
    confident(Measure.agreement, 0.5),
    confident(Measure.agreement, 0.9),
]


@cache
def model(first_exit: int = 1) -> EarlyExitT5:
    made = early_exit(random_t5(seed=4, decoder_layers=LAYERS), length=LENGTH)
    made.settings.exit_layers = list(range(first_exit, LAYERS))
    return made


def served_together(engine: Engine, rows: Sequence[Example], policies: Sequence[Policy]) -> list[Answer]:
    """Requests that arrive two steps apart, so that they are at different layers and positions."""
    answers: dict[str, Answer] = {}
    todo = list(zip(rows, policies, strict=True))[::-1]
    while todo or engine.has_work:
        for row, policy in (todo.pop() for _ in range(min(2, len(todo)))):
            engine.add_request(row.source, name=row.id, policy=policy)
        for _ in range(2):
            answers |= {answer.id: answer for answer in engine.step().answers}
    return [answers[row.id] for row in rows]


# candidates, against the rule written out


class ByHand:
    """One row's confidences within a step: every word in the first check, the best k of it in later ones."""

    def __init__(self, measure: Measure, k: int) -> None:
        self.measure, self.k = measure, k
        self.kept: list[int] = []
        self.word, self.run = -1, 0

    def confidence(self, logits: list[float]) -> float:
        ids = self.kept or list(range(len(logits)))
        if not self.kept:
            self.kept = sorted(ids, key=lambda i: -logits[i])[: self.k]
        top = max(ids, key=lambda i: logits[i])
        self.word, self.run = top, self.run + 1 if top == self.word else 1
        powers = [math.exp(logits[i] - logits[top]) for i in ids]
        shares = sorted((power / sum(powers) for power in powers), reverse=True)
        return {
            Measure.softmax: shares[0] - shares[1],
            Measure.max_prob: shares[0],
            Measure.entropy: 1 + sum(p * math.log(p) for p in shares if p > 0) / math.log(len(ids)),
            Measure.agreement: min(self.run / 3, 1.0),
        }[self.measure]

    def best(self, logits: list[float]) -> int:
        return max(self.kept, key=lambda i: logits[i])


@cache
@torch.inference_mode()
def by_hand(example: Example, policy: Confident, first_exit: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and crossing layers of one row with Hugging Face's modules."""
    settings, adapter = model(first_exit).settings, T5Adapter(model(first_exit))
    state = adapter.prefill(encode_source(model().tokenizer, example.source, settings))
    token, tokens, crossing = adapter.start_token_id, [], []
    for step in range(LENGTH):
        hidden, row = adapter.embed(token, step), ByHand(policy.measure, K)
        for layer in range(1, LAYERS + 1):
            hidden = adapter.layer(layer, hidden, state, step)
            logits = adapter.logits(hidden)[0, 0].tolist()
            if layer == LAYERS:
                token = max(range(VOCABULARY), key=lambda i: logits[i])
            elif layer in settings.exit_layers and row.confidence(logits) >= policy.schedule.at(step, layer):
                token = row.best(logits)
                break
        for above in range(layer + 1, LAYERS + 1):
            adapter.write_kv(above, state, step, *adapter.kv(above, hidden))
        tokens.append(token)
        crossing.append(layer)
        if token == adapter.eos_token_id:
            break
    return tuple(tokens), tuple(crossing)


@pytest.mark.parametrize("policy", CONFIDENT, ids=lambda p: f"{p.measure.value}-{p.schedule.threshold}")
def test_candidates_follow_the_rule_written_out(policy: Confident) -> None:
    expected = [by_hand(row, policy) for row in ROWS]
    assert len({layer for _, crossing in expected for layer in crossing}) > 1
    for rule in (BatchRule.own, BatchRule.compact):
        engine = Engine(
            model(), runner=models.RUNNER, head=Head.candidates, head_k=K, rule=rule, max_batch=4, poison=True
        )
        answers = engine.generate([row.source for row in ROWS], policy=policy)
        assert [(a.tokens, a.crossing_layers) for a in answers] == expected


def test_candidates_differ_from_the_full_head_somewhere() -> None:
    sources, policy = [row.source for row in ROWS], confident(Measure.softmax, 0.3)
    full, thin = (
        [
            (a.tokens, a.crossing_layers)
            for a in Engine(model(), runner=models.RUNNER, head=head, head_k=K).generate(sources, policy=policy)
        ]
        for head in (Head.full, Head.candidates)
    )
    assert full != thin


@pytest.mark.parametrize("first_exit", [1, 2])  # at 2 rows leave before the first check
@pytest.mark.parametrize("rule", EXACT)
def test_candidates_and_runs_survive_mates_that_have_none(rule: BatchRule, first_exit: int) -> None:
    rows = examples(VOCABULARY, 18, seed=6)
    kinds = [
        confident(Measure.state, 0.9),
        confident(Measure.agreement, 0.5),
        Static(1),
        confident(Measure.softmax, 0.3),
        confident(Measure.state, 0.8),
        Full(),
    ]
    policies = [kinds[i % len(kinds)] for i in range(len(rows))]
    engine = Engine(
        model(first_exit), head=Head.candidates, head_k=K, rule=rule, company=3, max_age=3, max_batch=6, poison=True
    )
    answers = served_together(engine, rows, policies)
    assert (rule is BatchRule.rebatch) == any(answer.parked for answer in answers)
    for row, policy, answer in zip(rows, policies, answers, strict=True):
        thin = isinstance(policy, Confident) and policy.measure is not Measure.state
        if thin:
            expected = by_hand(row, policy, first_exit)
        else:
            trace = BatchDecoder(model(first_exit))([row], policy)[0]
            expected = trace.tokens, trace.crossing_layers
        assert (answer.tokens, answer.crossing_layers) == expected, (row.id, policy)


# who never uses them


@pytest.mark.parametrize(
    "policy", [Full(), Static(2), confident(Measure.softmax, 1.0), confident(Measure.agreement, 1.0)], ids=repr
)
def test_without_exits_no_candidate_is_used(policy: Policy) -> None:
    rows = [row.source for row in ROWS]
    expected = [a.tokens for a in Engine(model()).generate(rows, policy=policy)]
    for rule in (*EXACT, *COUPLED):
        engine = Engine(model(), runner=models.RUNNER, head=Head.candidates, head_k=3, rule=rule, max_batch=4)
        assert [a.tokens for a in engine.generate(rows, policy=policy)] == expected


def test_a_row_at_threshold_one_never_uses_candidates_of_its_batch() -> None:
    policies = [confident(Measure.softmax, 0.3 if i % 2 else 1.0) for i in range(len(ROWS))]
    answers = served_together(Engine(model(), runner=models.RUNNER, head=Head.candidates, head_k=2), ROWS, policies)
    full = BatchDecoder(model())(ROWS, Full())
    assert [a.tokens for a in answers[::2]] == [trace.tokens for trace in full[::2]]
    assert all(set(a.crossing_layers) == {LAYERS} for a in answers[::2])


@pytest.mark.parametrize("measure", [Measure.state, Measure.classifier])
def test_measures_without_a_head_get_the_full_heads_tokens(measure: Measure) -> None:
    policy = confident(measure, 0.7 if measure is Measure.state else 0.5)
    traces = BatchDecoder(model())(ROWS, policy)
    assert len({layer for trace in traces for layer in trace.crossing_layers}) > 1
    engine = Engine(model(), runner=models.RUNNER, head=Head.candidates, head_k=2, max_batch=4)
    answers = engine.generate([row.source for row in ROWS], policy=policy)
    assert [(a.tokens, a.crossing_layers) for a in answers] == [(t.tokens, t.crossing_layers) for t in traces]
