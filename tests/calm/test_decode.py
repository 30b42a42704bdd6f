"""decode_one against Hugging Face greedy, decode_batch against decode_one, with depth that varies."""

import pytest
import torch
from transformers import T5ForConditionalGeneration

from calm.confidence import CONFIDENCE
from calm.config import Backfill, Measure, Schedule
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError
from calm.models.t5 import EarlyExitT5
from calm.policies import Confident, Full, Oracle, Policy, Replay, Static
from calm.records import DecodeTrace, Example
from calm.thresholds import ThresholdSchedule
from tests.calm.comparing import confident, essence, usual
from tests.scripted import early_exit, examples, random_t5, scripted

V = 97
SHAPES = {
    "v1.1": dict(tied=False, gated=True),
    "v1.0-tied": dict(tied=True, gated=False),
    "deeper-decoder": dict(tied=True, gated=True, encoder_layers=1, decoder_layers=6),
}


@pytest.fixture(scope="module")
def model() -> EarlyExitT5:
    return early_exit(random_t5(seed=1))


def greedy(hf: T5ForConditionalGeneration, model: EarlyExitT5, example: Example, length: int) -> tuple[int, ...]:
    """Hugging Face's own greedy answer, without its start token."""
    ids = torch.tensor([model.tokenizer(example.source)["input_ids"] + [1]])
    out = hf.generate(ids, max_new_tokens=length, do_sample=False, num_beams=1, use_cache=False, min_new_tokens=None)
    return tuple(out[0, 1:].tolist())


def spread(traces: list[DecodeTrace]) -> int:
    return len({layer for trace in traces for layer in trace.crossing_layers})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", [Full(), confident(Measure.softmax, 1.0)], ids=["full", "threshold-1"])
def test_full_depth_equals_hugging_face(shape: str, policy: Policy) -> None:
    hf = random_t5(seed=2, **SHAPES[shape])
    model = early_exit(hf)
    rows = examples(V, 6, seed=3)
    expected = [greedy(hf, model, row, 12) for row in rows]
    assert [trace.tokens for trace in OneDecoder(model)(rows, policy)] == expected
    assert [trace.tokens for trace in BatchDecoder(model, batch_size=4)(rows, policy)] == expected


def test_threshold_one_ignores_a_saturated_confidence() -> None:
    model = early_exit(scripted())
    model.hf.lm_head.weight.data.mul_(1000)  # softmax margins of exactly 1.0 at every layer
    rows = [Example("a", "a", "w3", "")]
    recorded = OneDecoder(model, record_confidences=True)(rows, confident(Measure.softmax, 0.9999))[0]
    assert max(max(c for c in step if c == c) for step in recorded.confidences if any(c == c for c in step)) == 1.0
    some = Confident(Measure.softmax, ThresholdSchedule((1.0, 1.0, 0.5, 1.0, 1.0)))
    for decoder in (OneDecoder(model), BatchDecoder(model)):
        assert set(decoder(rows, confident(Measure.softmax, 1.0))[0].crossing_layers) == {6}
        assert set(decoder(rows, some)[0].crossing_layers) == {3}


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_static_depth_equals_a_model_cut_there(layer: int) -> None:
    hf = random_t5(seed=4)
    model = early_exit(hf)
    cut = random_t5(seed=4)
    cut.decoder.block = cut.decoder.block[:layer]
    cut.config.num_decoder_layers = cut.decoder.config.num_layers = layer
    rows = examples(V, 5, seed=5)
    expected = [greedy(cut, model, row, 12) for row in rows]
    assert expected != [greedy(hf, model, row, 12) for row in rows]
    for decoder in (OneDecoder(model), BatchDecoder(model, batch_size=3)):
        assert [trace.tokens for trace in decoder(rows, Static(layer))] == expected


@pytest.mark.parametrize("backfill", list(Backfill))
@pytest.mark.parametrize("measure", list(CONFIDENCE))
def test_batch_equals_one(model: EarlyExitT5, measure: Measure, backfill: Backfill) -> None:
    rows = examples(V, 7, seed=6)
    policy = confident(measure, usual(model, measure))
    one = OneDecoder(model, backfill=backfill)(rows, policy)
    batch = BatchDecoder(model, backfill=backfill, batch_size=4)(rows, policy)
    assert [essence(trace) for trace in batch] == [essence(trace) for trace in one]
    assert spread(one) >= 3, "the depths must vary, or nothing of the backfill is read"


@pytest.mark.parametrize("kind", [Schedule.decaying, Schedule.decaying_released])
def test_batch_equals_one_with_decay_and_per_layer_thresholds(model: EarlyExitT5, kind: Schedule) -> None:
    rows = examples(V, 8, seed=7)
    policy = Confident(Measure.softmax, ThresholdSchedule((0.5, 0.3, 0.1), kind=kind, tau=4.0, length=12))
    one, batch = OneDecoder(model)(rows, policy), BatchDecoder(model, batch_size=8)(rows, policy)
    assert [essence(trace) for trace in batch] == [essence(trace) for trace in one]
    assert spread(one) >= 3


@pytest.mark.parametrize("backfill", list(Backfill))
def test_oracle_and_replay_batch_equals_one(model: EarlyExitT5, backfill: Backfill) -> None:
    rows = examples(V, 9, seed=8)
    one = OneDecoder(model, backfill=backfill)(rows, Oracle())
    batch = BatchDecoder(model, backfill=backfill, batch_size=5)(rows, Oracle())
    assert [essence(trace) for trace in batch] == [essence(trace) for trace in one]
    assert spread(one) >= 3
    replay = Replay({trace.id: trace.crossing_layers for trace in one})
    for decoder in (OneDecoder(model, backfill=backfill), BatchDecoder(model, backfill=backfill, batch_size=3)):
        assert [essence(trace) for trace in decoder(rows, replay)] == [essence(trace) for trace in one]


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.state])
def test_batch_equals_one_where_only_some_layers_are_checked(
    model: EarlyExitT5, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.settings, "exit_layers", [2])
    rows = examples(V, 8, seed=14)
    policy = confident(measure, usual(model, measure))
    one, batch = OneDecoder(model)(rows, policy), BatchDecoder(model, batch_size=5)(rows, policy)
    assert [essence(trace) for trace in batch] == [essence(trace) for trace in one]
    assert {layer for trace in one for layer in trace.crossing_layers} == {2, 4}


def test_batch_is_close_to_one_in_bf16() -> None:
    """Sums of another order round differently in bf16, and one near-tie changes the rest of its row: most are equal."""
    model = early_exit(random_t5(seed=1).to(torch.bfloat16))
    assert model.dtype is torch.bfloat16
    rows = examples(V, 16, seed=15)
    for policy in (Full(), confident(Measure.softmax, 0.4)):
        one, batch = OneDecoder(model)(rows, policy), BatchDecoder(model, batch_size=8)(rows, policy)
        same = sum(essence(left) == essence(right) for left, right in zip(one, batch, strict=True))
        assert same >= 12, same
        assert all(len(trace.tokens) == len(trace.crossing_layers) for trace in batch)
    assert spread(one) >= 3


def test_the_backfill_is_read(model: EarlyExitT5) -> None:
    """The control: with holes, copies or the true K/V instead, some answer must come out differently."""
    rows = examples(V, 12, seed=9)
    policy = Replay({row.id: [1 + (i + step) % 4 for step in range(12)] for i, row in enumerate(rows)})
    answers = {kind: [trace.tokens for trace in BatchDecoder(model, backfill=kind)(rows, policy)] for kind in Backfill}
    for kind in (Backfill.mask, Backfill.copy, Backfill.true):
        assert answers[kind] != answers[Backfill.project], kind


def test_backfilled_kv_is_each_layers_own_projection(model: EarlyExitT5) -> None:
    rows = examples(V, 1, seed=10)
    decoder = OneDecoder(model)
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    write = decoder.adapter.write_kv

    def spy(index: int, state: object, step: int, key: torch.Tensor, value: torch.Tensor) -> None:
        write(index, state, step, key, value)  # type: ignore[arg-type]
        stored = decoder.adapter.read_kv(index, state, step)  # type: ignore[arg-type]
        assert torch.equal(stored[0], key) and torch.equal(stored[1], value)
        seen.append((index, key, value))

    hiddens: list[torch.Tensor] = []
    logits = decoder.adapter.logits
    decoder.adapter.write_kv = spy  # type: ignore[method-assign]
    decoder.adapter.logits = lambda hidden: (hiddens.append(hidden), logits(hidden))[1]  # type: ignore[method-assign]
    decoder(rows, Static(2))
    assert len(seen) == 2 * len(hiddens)
    for position, (index, key, value) in enumerate(seen):
        sublayer = model.hf.decoder.block[index - 1].layer[0]
        normed = sublayer.layer_norm(hiddens[position // 2])
        assert torch.equal(sublayer.SelfAttention.k(normed).view(1, 1, 2, 16).transpose(1, 2), key)
        assert torch.equal(sublayer.SelfAttention.v(normed).view(1, 1, 2, 16).transpose(1, 2), value)


def test_scripted_story() -> None:
    model = early_exit(scripted())
    rows = [Example("a", "a", "w3", ""), Example("b", "b", "w4", "")]
    for decoder in (OneDecoder(model), BatchDecoder(model)):
        full = decoder(rows, Full())
        assert [trace.tokens for trace in full] == [(5, 6, 7, 8, 1), (10, 11, 1)]
        assert all(trace.finished for trace in full)
        oracle = decoder(rows, Oracle())
        assert [trace.crossing_layers for trace in oracle] == [(1, 1, 4, 1, 1), (1, 6, 1)]
        assert [trace.tokens for trace in oracle] == [trace.tokens for trace in full]
        assert decoder(rows, Static(3))[0].tokens[:3] == (5, 6, 9)


def test_an_answer_without_eos_ends_at_n() -> None:
    model = early_exit(scripted(nxt={10: 10}, late={}), length=7)
    rows = [Example("b", "b", "w4", "")]
    for decoder in (OneDecoder(model), BatchDecoder(model)):
        trace = decoder(rows, Full())[0]
        assert trace.tokens == (10,) * 7 and not trace.finished


def test_confidences_are_recorded_up_to_the_crossing(model: EarlyExitT5) -> None:
    rows = examples(V, 5, seed=11)
    policy = confident(Measure.softmax, usual(model, Measure.softmax))
    one = OneDecoder(model, record_confidences=True)(rows, policy)
    batch = BatchDecoder(model, record_confidences=True)(rows, policy)
    for expected, trace in zip(one, batch, strict=True):
        for crossing, left, right in zip(trace.crossing_layers, expected.confidences, trace.confidences, strict=True):
            known = [value for value in right if value == value]
            assert len(known) == min(crossing, 3)
            torch.testing.assert_close(torch.tensor(left), torch.tensor(right), equal_nan=True, atol=1e-5, rtol=1e-5)


def test_exit_layers_are_respected(model: EarlyExitT5) -> None:
    model.settings.exit_layers = [2]
    try:
        rows = examples(V, 6, seed=12)
        for decoder in (OneDecoder(model), BatchDecoder(model)):
            for policy in (confident(Measure.max_prob, 0.3), Oracle()):
                layers = {layer for trace in decoder(rows, policy) for layer in trace.crossing_layers}
                assert layers == {2, 4}
    finally:
        model.settings.exit_layers = [1, 2, 3]


def test_a_higher_threshold_never_leaves_earlier_at_the_first_token(model: EarlyExitT5) -> None:
    rows = examples(V, 10, seed=13)
    first = [
        [trace.crossing_layers[0] for trace in BatchDecoder(model)(rows, confident(Measure.softmax, threshold))]
        for threshold in (0.1, 0.3, 0.6, 1.0)
    ]
    for lower, higher in zip(first, first[1:], strict=False):
        assert all(a <= b for a, b in zip(lower, higher, strict=True))


def test_wrong_requests_are_refused_by_name(model: EarlyExitT5) -> None:
    with pytest.raises(ConfigError, match="depth 9 lies outside 1..4"):
        OneDecoder(model)(examples(V, 1), Static(9))
    with pytest.raises(ConfigError, match=r"threshold must lie in \[0, 1\], got 1.5"):
        ThresholdSchedule(1.5)
    with pytest.raises(ConfigError, match="2 thresholds for 4 layers"):
        OneDecoder(model)(examples(V, 1), Confident(Measure.softmax, ThresholdSchedule((0.1, 0.2))))
    bare = early_exit(random_t5())
    bare.settings.has_classifier = False
    with pytest.raises(ConfigError, match="needs a trained exit classifier"):
        BatchDecoder(bare)(examples(V, 1), confident(Measure.classifier, 0.5))
