"""The engine over decoder-only models: row-exact rules against decode_one, whatever the mates, blocks and policies."""

from dataclasses import replace

import pytest
import torch

from calm.config import BatchRule, Head, Measure, Schedule
from calm.data.text import encode_source
from calm.errors import ConfigError
from calm.policies import Full, Policy, Static
from serve.engine import Engine
from serve.model import served
from serve.native.build import NativeError
from serve.requests import Status
from tests.calm.comparing import confident, usual
from tests.causal import early_opt, random_opt

from .causal_models import (
    LAYERS,
    LENGTH,
    SHAPES,
    causal,
    causal_engine,
    causal_served,
    mixed,
    policy_for,
    rows,
    texts,
    told,
)
from .models import EXACT
from .near_ties import Tally
from .plain_rules import PLAIN, SHARE, same_as_plain


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("rule", EXACT, ids=lambda rule: rule.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_policies_equal_decode_one(shape: str, rule: BatchRule, max_batch: int) -> None:
    """Every kind of policy side by side; sources of all lengths."""
    engine, tally = causal_engine(rule, causal_served(shape), max_batch=max_batch), Tally()
    asked = [(number % 12, kind) for number, kind in enumerate(sorted(mixed(shape)))]
    for place, (number, kind) in enumerate(asked):
        name = f"r{place}"
        engine.add_request(rows()[number].source, policy=policy_for(kind, name, number, shape), name=name)
    while engine.has_work:
        for answer in engine.step().answers:
            number, kind = asked[int(answer.id[1:])]
            assert answer.status is Status.finished, answer
            tally.compare(answer, told(number, kind, shape))
    tally.check()
    assert not engine.slots.taken and engine.slots.blocks.free == engine.slots.blocks.count


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.sync], ids=lambda rule: rule.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_depth_equals_hugging_face(shape: str, rule: BatchRule) -> None:
    model = causal(shape)
    answers = causal_engine(rule, causal_served(shape), max_batch=4).generate(texts(6), policy=Full())
    for text, answer in zip(texts(6), answers, strict=True):
        ids = torch.tensor([encode_source(model.tokenizer, text, model.settings)])
        out = model.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        assert answer.tokens == tuple(out[0, ids.shape[1] :].tolist())
        assert answer.certified and set(answer.emission_layers) == {4}


@pytest.mark.parametrize("shape", ["llama", "opt-350m"])
@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.value)
def test_coupled_rules_equal_their_transcription(rule: BatchRule, shape: str) -> None:
    model, count = causal(shape), 6
    easy = confident(Measure.softmax, 0.6 * usual(model, Measure.softmax))
    later = confident(Measure.state, usual(model, Measure.state))
    policies: list[Policy] = [easy, Static(2), mixed(shape)["decaying"], easy, later, Static(1)]
    engine = causal_engine(rule, causal_served(shape), quantile=SHARE, max_batch=count, prefill_calls=count)
    same_as_plain(model, engine, texts(count), policies, [0, 0, 1, 3, 3, 12])


@pytest.mark.parametrize("head", [Head.candidates, Head.screened], ids=lambda head: head.value)
@pytest.mark.parametrize("shape", ["llama", "opt-350m"])
def test_thin_heads_keep_rows_apart(shape: str, head: Head) -> None:
    """Mates, rules and batch sizes change nothing; where no confidence asks it, words are the full head's."""
    kinds = ["softmax", "entropy", "agreement", "state", "classifier", "static", "full"]

    def answers(rule: BatchRule, max_batch: int, head: Head) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        engine = causal_engine(rule, causal_served(shape), max_batch=max_batch, head=head, head_k=5)
        for place, kind in enumerate(kinds):
            engine.add_request(texts()[place], policy=mixed(shape)[kind], name=str(place))
        found = {}
        while engine.has_work:
            found |= {answer.id: answer for answer in engine.step().answers}
        return [(found[str(i)].tokens, found[str(i)].crossing_layers) for i in range(len(kinds))]

    alone = answers(BatchRule.own, 1, head)
    assert alone == answers(BatchRule.own, 7, head) == answers(BatchRule.compact, 4, head)
    assert alone[3:] == answers(BatchRule.own, 1, Head.full)[3:]


def test_confidences_are_recorded_from_the_second_token_on() -> None:
    engine = causal_engine(BatchRule.compact, max_batch=4, record_confidences=True)
    answers = engine.generate(texts(5), policy=mixed()["softmax"])
    for number, answer in enumerate(answers):
        expected = torch.tensor(told(number, "softmax").trace.confidences)
        torch.testing.assert_close(torch.tensor(answer.confidences), expected, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_comes_again_is_not_read_again() -> None:
    engine = causal_engine(BatchRule.own, max_batch=2)
    first = engine.generate(texts(2))
    again = engine.generate(texts(2))
    assert engine.cross_cache.hits == 2
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    assert engine.cross_cache.max_bytes == engine.slots.held_bytes


def test_rule_auto_measures_the_paged_runner() -> None:
    engine = Engine(causal_served(), rule=BatchRule.auto, max_batch=2, block_size=4)
    policy = mixed()["softmax"]
    assert [a.tokens for a in engine.generate(texts(3), policy=policy)] == [
        a.tokens for a in causal_engine(BatchRule.own).generate(texts(3), policy=policy)
    ]
    small = Engine(
        replace(causal_served(), costs={}), rule=BatchRule.auto, max_batch=2, block_size=4, cache_blocks=4 * LAYERS
    )
    assert small.slots.blocks.free == 4 * LAYERS  # the two share what one has room for
    with pytest.raises(
        ConfigError, match="have no room for 1 at once with answers of 12 tokens from 4 layers; raise cache_"
    ):
        Engine(
            replace(causal_served(), costs={}), rule=BatchRule.auto, max_batch=2, block_size=4, cache_blocks=2 * LAYERS
        )


def test_other_runners_and_longer_lengths_are_refused() -> None:
    with pytest.raises(NativeError, match="no decoder with positions by rotary and no cross-attention; use runner=eag"):
        Engine(causal_served(), runner="native")
    with pytest.raises(ConfigError, match="runner=graph has no decoder without cross-attention; use runner=eager"):
        Engine(causal_served(), runner="graph")
    with pytest.raises(ConfigError, match="int8 needs runner=native"):
        Engine(causal_served(), weights="int8")
    model = early_opt(random_opt())
    model.settings.max_target_tokens = 50
    with pytest.raises(ConfigError, match="sources of up to 16 tokens and answers of up to 50 do not fit"):
        served(model)


def test_schedules_have_the_answers_own_steps() -> None:
    """A decaying threshold counts from the first token, not from the prompt."""
    policy = confident(Measure.softmax, usual(causal(), Measure.softmax), Schedule.decaying)
    found = causal_engine(BatchRule.own, max_batch=3).generate(texts(6), policy=policy)
    for number, answer in enumerate(found):
        Tally().compare(answer, told(number, "decaying"))
