"""Sampling: the right distribution, the same draws for the same seed, whoever the mates are."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from calm.config import BatchRule
from serve.engine import Engine
from serve.options import RequestOptions
from serve.sampling import choose, draw, uniform

from .models import EXACT, engine_of, mixed_policies, texts, tiny_served

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5, 0.0])


def expected(temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities by the definition: the fewest most probable tokens that reach top_p, renormalised."""
    probabilities = (LOGITS.double() / temperature).softmax(-1)
    total, kept = 0.0, torch.zeros_like(probabilities)
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p:
            break
        total += float(probabilities[token])
        kept[token] = probabilities[token]
    return kept / kept.sum()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8), (1.5, 0.5)])
def test_draws_have_the_exact_probabilities(temperature: float, top_p: float) -> None:
    count = 8000
    found = Counter(draw(LOGITS, temperature, top_p, uniform(11, step)) for step in range(count))
    wanted = expected(temperature, top_p)
    possible = [token for token in range(len(LOGITS)) if wanted[token] > 0]
    assert set(found) <= set(possible)
    observed = [found[token] for token in possible]
    assert chisquare(observed, [count * float(wanted[token]) for token in possible]).pvalue > 0.01


def test_uniform_numbers_are_uniform_over_seeds_and_steps() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(2000)], [uniform(3, step) for step in range(2000)]):
        assert all(0.0 <= number < 1.0 for number in numbers)
        assert chisquare(torch.histc(torch.tensor(numbers), 10, 0, 1).tolist()).pvalue > 0.01


def test_a_number_next_to_one_draws_nothing_that_has_no_probability() -> None:
    logits = torch.tensor([39.0, 38.5, 1.0])
    for number in (1 - 2**-53, 1 - 2**-52, 0.0):
        assert draw(logits, 1e-3, 1.0, number) == draw(logits, 1e-3, 0.9, number) == 0


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([1e-3, 1e-12, 1e-300, 5e-324]),
)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_at_temperature_zero_the_limit_is_greedy(values: list[float], number: float, temperature: float) -> None:
    logits = torch.tensor(values)
    token = draw(logits, temperature, 1.0, number)
    top = float(logits.max())
    assert float(logits[token]) == top or (top - float(logits[token])) / temperature < 40


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
    st.floats(1e-9, 1.0),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_any_draw_is_a_token(values: list[float], temperature: float, top_p: float, number: float) -> None:
    assert 0 <= draw(torch.tensor(values), temperature, top_p, number) < len(values)


def test_a_tiny_top_p_is_greedy() -> None:
    assert {draw(LOGITS, 1.0, 1e-9, uniform(0, step)) for step in range(50)} == {1}


def test_tokens_that_would_end_too_early_are_not_drawn() -> None:
    options = RequestOptions(temperature=1.0, min_tokens=3)
    drawn = {choose(LOGITS, 1, options, seed, [1, 4]) for seed in range(300)}
    assert drawn == {0, 2, 3, 5}
    assert 1 in {choose(LOGITS, 2, options, seed, [1, 4]) for seed in range(300)}
    assert choose(torch.full((5,), float("nan")), 0, options, 0, [1]) is None
    assert choose(torch.tensor([1.0, float("inf")]), 3, options, 0, []) is None


def sampled(engine: Engine, seed: int | None, mates: int) -> tuple[int, ...]:
    for mate in range(mates):
        engine.add_request(texts()[mate + 1], policy=mixed_policies()["softmax"], temperature=0.7, seed=mate)
    name = engine.add_request(
        texts()[0], policy=mixed_policies()["softmax"], temperature=0.9, top_p=0.95, seed=seed, name=f"mine{seed}"
    )
    while engine.has_work:
        for answer in engine.step().answers:
            if answer.id == name:
                tokens = answer.tokens
                assert not answer.certified
    return tokens


@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
def test_draws_do_not_depend_on_mates(rule: BatchRule) -> None:
    def engine() -> Engine:
        return engine_of(rule, max_batch=4, buckets=(4,))

    alone = sampled(engine(), 11, 0)
    assert alone == sampled(engine(), 11, 3) == sampled(engine(), 11, 6)
    assert len({sampled(engine(), seed, 0) for seed in range(11, 17)}) >= 4


def test_without_a_seed_each_request_has_its_own() -> None:
    engine = Engine(tiny_served(), max_batch=4, poison=True)
    first = engine.generate([texts()[0]] * 4, temperature=1.5)
    assert len({answer.tokens for answer in first}) >= 3
    same = engine.generate([texts()[0]] * 4, temperature=1.5, seed=5)
    assert len({answer.tokens for answer in same}) == 1


def test_a_low_temperature_is_greedy_in_the_engine() -> None:
    engine = Engine(tiny_served(), max_batch=4, poison=True)
    cold = engine.generate(texts(6), temperature=1e-9)
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in engine.generate(texts(6))]
