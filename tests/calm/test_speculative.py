"""Self-speculative decoding: full depth's tokens, whatever is drafted; a batch equal to one by one."""

from typing import Any

import pytest
import torch

from calm.config import Measure
from calm.decode import OneDecoder
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.models.speaking import SpeakingModel
from calm.near_ties import Reference, parts_at
from calm.policies import Full
from calm.records import DecodeTrace, Example
from calm.speculative import SpeculativeBatch, SpeculativeOne
from tests.calm.test_causal import greedy as greedy_causal
from tests.calm.test_decode import greedy as greedy_t5
from tests.causal import V, early_llama, early_opt, random_llama, random_opt
from tests.scripted import early_exit, examples, random_t5, scripted
from tests.smollm2 import TEXTS, smollm2, smollm2_test

MODELS = {
    "t5-v1.1": lambda: early_exit(random_t5(seed=1)),
    "t5-v1.0": lambda: early_exit(random_t5(seed=2, tied=True, gated=False, decoder_layers=6)),
    "llama": lambda: early_llama(random_llama(seed=1)),
    "llama-one-kv-head": lambda: early_llama(random_llama(seed=1, kv_heads=1, tied=True)),
    "opt": lambda: early_opt(random_opt(seed=1)),
    "opt-350m": lambda: early_opt(random_opt(seed=1, pre_norm=False, words=12)),
}
DRAFTS = [
    Draft(1),
    Draft(3, 16),
    Draft(2, 4, Measure.softmax, 0.3),
    Draft(3, 2, Measure.state, 0.9),
    Draft(2, 8, Measure.classifier, 0.5),
    Draft(1, 5, Measure.max_prob, 1.0),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> SpeakingModel:
    made: SpeakingModel = MODELS[request.param]()
    return made


def alike(model: SpeakingModel, mine: list[DecodeTrace], rows: list[Example]) -> None:
    """Full depth's tokens; what differs, differs first at a near-tie, and in one row at most."""
    reference, differing = Reference(model, record_confidences=True), 0
    for trace, row in zip(mine, rows, strict=True):
        told = reference.tell(row, Full())
        if trace.tokens != told.trace.tokens:
            step = parts_at((trace.tokens, trace.crossing_layers), (told.trace.tokens, told.trace.crossing_layers))
            assert step is not None and told.nearly(step), (trace.tokens, told.trace.tokens)
            differing += 1
    assert differing <= 1


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("kind", ["t5-v1.1", "llama"])
def test_answers_are_full_depths_whatever_the_draft(kind: str, draft: Draft) -> None:
    check(MODELS[kind](), draft)


@pytest.mark.parametrize("draft", DRAFTS[1:3], ids=str)
def test_answers_are_full_depths_in_every_kind_of_model(model: SpeakingModel, draft: Draft) -> None:
    check(model, draft)


def check(model: SpeakingModel, draft: Draft) -> None:
    """Full depth's tokens, all layers everywhere, nothing filled; batches of two sizes equal to one by one."""
    rows = examples(V, 5, seed=3)
    one = SpeculativeOne(model, draft)(rows)
    alike(model, one, rows)
    for trace in one:
        assert set(trace.emission_layers) | set(trace.executed_layers) == {model.num_layers}
        assert set(trace.backfilled_layers) == {0}
        assert 0 <= trace.accepted <= trace.drafted <= draft.length * trace.rounds
        assert trace.rounds <= len(trace.tokens)
    for size in (1, 4):
        assert SpeculativeBatch(model, draft, batch_size=size)(rows) == one, size


def test_answers_are_hugging_faces(model: SpeakingModel) -> None:
    rows, greedy = examples(V, 4, seed=4), greedy_t5 if "T5" in type(model).__name__ else greedy_causal
    expected = [greedy(model.hf, model, row, 12) for row in rows]  # type: ignore[arg-type]
    assert [trace.tokens for trace in SpeculativeOne(model, Draft(2))(rows)] == expected
    assert [trace.tokens for trace in SpeculativeBatch(model, Draft(2))(rows)] == expected


@pytest.mark.parametrize("length", [1, 2, 5])
def test_no_draft_reaches_beyond_the_answers_limit(model: SpeakingModel, length: int) -> None:
    rows, draft = examples(V, 6, seed=5), Draft(3, 9)
    full = OneDecoder(model, max_new_tokens=length)(rows, Full())
    one = SpeculativeOne(model, draft, max_new_tokens=length)(rows)
    assert [trace.tokens for trace in one] == [trace.tokens for trace in full]
    assert SpeculativeBatch(model, draft, max_new_tokens=length)(rows) == one
    assert all(trace.drafted <= max(length - 1, 0) * trace.rounds for trace in one)


def test_the_grid_says_something() -> None:
    """The control: rows of a batch accept differently, drafts end by confidence, and answers end at EOS within one."""
    model, rows = MODELS["llama"](), examples(V, 24, seed=3)
    long = SpeculativeBatch(model, Draft(3, 4))(rows)
    assert len({trace.accepted / max(trace.drafted, 1) for trace in long}) >= 4
    assert any(trace.finished for trace in long) and not all(trace.finished for trace in long)
    sure = SpeculativeBatch(model, Draft(3, 4, Measure.softmax, 0.3))(rows)
    assert [trace.tokens for trace in sure] == [trace.tokens for trace in long]
    assert sum(trace.drafted for trace in sure) < sum(trace.drafted for trace in long)


def test_scripted_story() -> None:
    """w3 says 5 6 7 8 </s>, and below layer 4 a 9 after the 6; w4 says 10 11 </s>, and below layer 6 a 12 after the 10.

    By hand: of w3, layer 1 drafts 5 6 9, of which two are right, and 5 6 7 are said; then 8 </s>.
    """
    model = early_exit(scripted())
    rows = [Example("a", "a", "w3", ""), Example("b", "b", "w4", "")]
    told = {  # rounds, drafted, accepted
        Draft(1, 3): [(2, 5, 4), (2, 4, 2)],
        Draft(4, 4): [(1, 4, 4), (2, 5, 2)],
        Draft(4, 5): [(1, 5, 5), (2, 6, 2)],
        Draft(1, 1): [(3, 3, 2), (2, 2, 2)],
    }
    for draft, right in told.items():
        for decoder in (SpeculativeOne(model, draft), SpeculativeBatch(model, draft)):
            traces = decoder(rows)
            assert [trace.tokens for trace in traces] == [(5, 6, 7, 8, 1), (10, 11, 1)]
            assert [(trace.rounds, trace.drafted, trace.accepted) for trace in traces] == right, draft


def test_true_keys_and_values_are_kept(model: SpeakingModel) -> None:
    """After an answer the cache holds what full depth alone would have written, and no forgotten position."""
    row = examples(V, 1, seed=8)
    states: dict[str, Any] = {}
    full, mine = OneDecoder(model), SpeculativeOne(model, Draft(2, 3))
    for name, decoder in (("full", full), ("mine", mine)):
        prefill = decoder.adapter.prefill

        def kept(ids: list[int], name: str = name, prefill: Any = prefill) -> Any:
            states[name] = prefill(ids)
            return states[name]

        decoder.adapter.prefill = kept  # type: ignore[method-assign]
    tokens = full(row, Full())[0].tokens
    assert mine(row)[0].tokens == tokens
    for layer in range(1, model.num_layers + 1):
        for step in range(1, len(tokens)):
            pair = [each.adapter.read_kv(layer, states[name], step) for name, each in (("full", full), ("mine", mine))]
            for left, right in zip(*pair, strict=True):
                torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_a_draft_that_does_not_fit_is_refused_by_name() -> None:
    model = early_exit(random_t5())
    model.settings.has_classifier = False
    for decoder in (SpeculativeOne, SpeculativeBatch):
        with pytest.raises(ConfigError, match=r"layer 4 lies outside 1\.\.3"):
            decoder(model, Draft(4))
        with pytest.raises(ConfigError, match="needs a trained exit classifier"):
            decoder(model, Draft(2, measure=Measure.classifier, threshold=0.5))


@smollm2_test
def test_smollm2() -> None:
    model = smollm2()
    rows = [Example(f"t{number}", f"t{number}", text, "") for number, text in enumerate(TEXTS[:3])]
    expected = [greedy_causal(model.hf, model, row, 24) for row in rows]
    for draft in (Draft(28, 3), Draft(20, 4, Measure.softmax, 0.2)):
        for decoder in (SpeculativeOne(model, draft), SpeculativeBatch(model, draft)):
            traces = decoder(rows)
            assert [trace.tokens for trace in traces] == expected
            assert draft.measure is not None or sum(trace.accepted for trace in traces) > 0
