"""Decoder-only models: decode_one against Hugging Face greedy, decode_batch against decode_one, with varying depth."""

from typing import Any

import pytest
import torch

from calm.confidence import CONFIDENCE
from calm.config import Backfill, Measure
from calm.data.text import encode_source
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError, DataError
from calm.models.causal import CausalAdapter, CausalModel
from calm.near_ties import Reference, parts_at
from calm.policies import Full, Oracle, Policy, Replay, Static
from calm.records import DecodeTrace, Example
from tests.calm.comparing import confident, essence, usual
from tests.causal import V, early_llama, early_opt, random_llama, random_opt
from tests.scripted import examples

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": dict(kv_heads=2),
    "one-kv-head": dict(kv_heads=1, tied=True),
    "all-kv-heads": dict(kv_heads=4),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "wide-heads": dict(head_dim=12, kv_heads=2),
    "llama3-rope": dict(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }
    ),
}  # fmt: skip


OPTS: dict[str, dict[str, Any]] = {
    "opt": dict(),
    "opt-350m": dict(pre_norm=False, words=12),
    "opt-without-final-norm": dict(_remove_final_layer_norm=True, tie_word_embeddings=False, enable_bias=False),
}


def make(shape: str, seed: int = 1) -> CausalModel:
    if shape in OPTS:
        return early_opt(random_opt(seed=seed, **OPTS[shape]))
    return early_llama(random_llama(seed=seed, **SHAPES[shape]))


@pytest.fixture(scope="module", params=[*SHAPES, *OPTS])
def model(request: pytest.FixtureRequest) -> CausalModel:
    return make(request.param)


@pytest.fixture(scope="module")
def grouped() -> CausalModel:
    return make("grouped")


def greedy(hf: Any, model: CausalModel, example: Example, length: int) -> tuple[int, ...]:
    """Hugging Face's own greedy answer, without its prompt."""
    ids = torch.tensor([encode_source(model.tokenizer, example.source, model.settings)])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, num_beams=1)
    return tuple(out[0, ids.shape[1] :].tolist())


def spread(traces: list[DecodeTrace]) -> int:
    return len({layer for trace in traces for layer in trace.crossing_layers[1:]})


def alike(model: CausalModel, mine: list[DecodeTrace], rows: list[Example], policy: Policy, backfill: Backfill) -> None:
    """Equal to decode_one; what differs, differs first at a near-tie, and in one row at most."""
    reference = Reference(model, backfill=backfill, record_confidences=True)
    differing = 0
    for trace, row in zip(mine, rows, strict=True):
        told = reference.tell(row, policy)
        if essence(trace) != essence(told.trace):
            step = parts_at((trace.tokens, trace.crossing_layers), (told.trace.tokens, told.trace.crossing_layers))
            assert step is not None and told.nearly(step), (essence(trace), essence(told.trace))
            differing += 1
    assert differing <= 1


@pytest.mark.parametrize("policy", [Full(), confident(Measure.softmax, 1.0)], ids=["full", "threshold-1"])
def test_full_depth_equals_hugging_face(model: CausalModel, policy: Policy) -> None:
    rows = examples(V, 6, seed=3)
    expected = [greedy(model.hf, model, row, 12) for row in rows]
    assert [trace.tokens for trace in OneDecoder(model)(rows, policy)] == expected
    assert [trace.tokens for trace in BatchDecoder(model, batch_size=4)(rows, policy)] == expected


def test_answers_end_at_different_steps(grouped: CausalModel) -> None:
    """The control: in a batch some rows end early, others late or never."""
    traces = OneDecoder(grouped)(examples(V, 24, seed=3), Full())
    assert len({len(trace.tokens) for trace in traces if trace.finished}) >= 3
    assert not all(trace.finished for trace in traces)


@pytest.mark.parametrize("layer", [1, 3])
def test_static_depth_after_the_first_token_equals_a_model_cut_there(grouped: CausalModel, layer: int) -> None:
    """The upper layers of the prompt say the first token; a stack cut at the layer says the others."""
    rows = examples(V, 6, seed=5)
    cut = random_llama(seed=1, **SHAPES["grouped"])
    cut.model.layers = cut.model.layers[:layer]
    cut.config.num_hidden_layers = layer
    expected = []
    for row, full in zip(rows, OneDecoder(grouped)(rows, Full()), strict=True):
        ids = encode_source(grouped.tokenizer, row.source, grouped.settings)
        said = [full.tokens[0]]
        while said[-1] != 1 and len(said) < 12:
            with torch.no_grad():
                said.append(int(cut(torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
        expected.append(tuple(said))
    for decoder in (OneDecoder(grouped), BatchDecoder(grouped, batch_size=3)):
        traces = decoder(rows, Static(layer))
        assert [trace.tokens for trace in traces] == expected
        assert all(trace.crossing_layers == (4, *[layer] * (len(trace.tokens) - 1)) for trace in traces)
        assert all(trace.backfilled_layers == (0, *[4 - layer] * (len(trace.tokens) - 1)) for trace in traces)


@pytest.mark.parametrize("backfill", list(Backfill))
@pytest.mark.parametrize("measure", list(CONFIDENCE))
def test_batch_equals_one(grouped: CausalModel, measure: Measure, backfill: Backfill) -> None:
    rows, policy = examples(V, 9, seed=6), confident(measure, usual(grouped, measure))
    batch = BatchDecoder(grouped, backfill=backfill, batch_size=5)(rows, policy)
    alike(grouped, batch, rows, policy, backfill)
    assert spread(batch) >= 3, "the depths must vary, or nothing of the backfill is read"


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.state, Measure.classifier])
def test_batch_equals_one_in_every_shape(model: CausalModel, measure: Measure) -> None:
    rows, policy = examples(V, 12, seed=7), confident(measure, usual(model, measure))
    alike(model, BatchDecoder(model, batch_size=12)(rows, policy), rows, policy, Backfill.project)


@pytest.mark.parametrize("backfill", list(Backfill))
def test_oracle_and_replay_batch_equals_one(grouped: CausalModel, backfill: Backfill) -> None:
    rows = examples(V, 9, seed=8)
    one = OneDecoder(grouped, backfill=backfill)(rows, Oracle())
    batch = BatchDecoder(grouped, backfill=backfill, batch_size=5)(rows, Oracle())
    assert [essence(trace) for trace in batch] == [essence(trace) for trace in one]
    assert spread(one) >= 3
    replay = Replay({trace.id: trace.crossing_layers for trace in one})
    for decoder in (OneDecoder(grouped, backfill=backfill), BatchDecoder(grouped, backfill=backfill, batch_size=3)):
        assert [essence(trace) for trace in decoder(rows, replay)] == [essence(trace) for trace in one]


def test_the_backfill_is_read(grouped: CausalModel) -> None:
    """The control: with holes, copies or the true K/V instead, some answer must come out differently."""
    rows = examples(V, 12, seed=9)
    policy = Replay({row.id: [1 + (i + step) % 4 for step in range(12)] for i, row in enumerate(rows)})
    answers = {
        kind: [trace.tokens for trace in BatchDecoder(grouped, backfill=kind)(rows, policy)] for kind in Backfill
    }
    for kind in (Backfill.mask, Backfill.copy, Backfill.true):
        assert answers[kind] != answers[Backfill.project], kind


def test_the_oracle_over_true_kv_says_what_full_depth_says(grouped: CausalModel) -> None:
    rows = examples(V, 6, seed=10)
    oracle = BatchDecoder(grouped, backfill=Backfill.true)(rows, Oracle())
    assert [trace.tokens for trace in oracle] == [trace.tokens for trace in OneDecoder(grouped)(rows, Full())]


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_a_prompt_is_read_alike_in_chunks_of_any_size(model: CausalModel, chunk: int) -> None:
    ids = [5, 9, 33, 2, 61, 17, 1]
    whole, parts = (CausalAdapter(model, size).prefill(ids) for size in (64, chunk))
    torch.testing.assert_close(parts.hidden, whole.hidden, atol=1e-4, rtol=1e-4)
    for mine, right in zip(parts.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, right.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, right.values, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        expected = model.hf(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(model.logits(whole.hidden)[0, 0], expected, atol=1e-4, rtol=1e-4)


def test_backfilled_kv_is_what_the_layer_itself_would_write(model: CausalModel) -> None:
    """Own norm, own projections, and turned to the position that the token stands at."""
    adapter = CausalAdapter(model)
    state = adapter.prefill([5, 9, 33, 1])
    hidden = adapter.embed(7, 1, state)
    for layer in range(1, 5):
        key, value = adapter.kv(layer, hidden, state, 1)
        hidden = adapter.layer(layer, hidden, state, 1)
        written = adapter.read_kv(layer, state, 1)
        torch.testing.assert_close(key, written[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(value, written[1], atol=1e-6, rtol=1e-6)


def test_teacher_forcing_is_one_pass_of_hugging_face(model: CausalModel) -> None:
    sources = torch.tensor([[5, 9, 33, 1, 0, 0], [4, 8, 15, 16, 23, 1]])
    mask = sources != 0
    targets = torch.tensor([[7, 60, 1], [12, 1, 0]])
    before = torch.cat([torch.full_like(targets[:, :1], model.start_token_id), targets[:, :-1]], dim=1)
    with torch.no_grad():
        hiddens = model.answer_hiddens(sources, mask, before)
        for row in range(2):
            ids = torch.tensor([[*sources[row][mask[row]].tolist(), *targets[row, :-1].tolist()]])
            out = model.hf(ids, output_hidden_states=True)
            asked = slice(int(mask[row].sum()) - 1, None)
            for layer in range(1, 4):  # Hugging Face's last one is normed
                right = out.hidden_states[layer][0, asked]
                torch.testing.assert_close(hiddens[layer - 1][row], right, atol=1e-4, rtol=1e-4)
            logits = model.logits(hiddens[-1][row])
            torch.testing.assert_close(logits, out.logits[0, asked], atol=1e-4, rtol=1e-4)


def test_a_batch_is_close_to_one_in_bf16(grouped: CausalModel) -> None:
    model = early_llama(random_llama(seed=1).to(torch.bfloat16))
    rows = examples(V, 16, seed=15)
    one, batch = (decoder(model)(rows, Full()) for decoder in (OneDecoder, BatchDecoder))
    assert sum(left.tokens == right.tokens for left, right in zip(one, batch, strict=True)) >= 12


def test_confidences_are_recorded_from_the_second_token_on(grouped: CausalModel) -> None:
    rows, policy = examples(V, 5, seed=11), confident(Measure.softmax, usual(grouped, Measure.softmax))
    one = OneDecoder(grouped, record_confidences=True)(rows, policy)
    batch = BatchDecoder(grouped, record_confidences=True)(rows, policy)
    for expected, trace in zip(one, batch, strict=True):
        assert all(value != value for value in trace.confidences[0])
        for left, right in zip(expected.confidences, trace.confidences, strict=True):
            torch.testing.assert_close(torch.tensor(left), torch.tensor(right), equal_nan=True, atol=1e-4, rtol=1e-4)


def test_what_is_put_around_a_source(grouped: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped.settings, "source_start", [2, 3])
    monkeypatch.setattr(grouped.settings, "source_end", [])
    monkeypatch.setattr(grouped.settings, "max_source_tokens", 4)
    assert encode_source(grouped.tokenizer, "w5 w6 w7", grouped.settings) == [2, 3, 5, 6]
    with pytest.raises(DataError, match="has 5 tokens, the model takes 4"):
        encode_source(grouped.tokenizer, "w5 w6 w7", grouped.settings, cut=False)
    monkeypatch.setattr(grouped.settings, "max_source_tokens", 1)
    with pytest.raises(DataError, match="max_source_tokens=1 is less than the 2 tokens that stand around a source"):
        encode_source(grouped.tokenizer, "w5", grouped.settings)
    monkeypatch.setattr(grouped.settings, "source_start", [])
    with pytest.raises(DataError, match="an empty prompt"):
        OneDecoder(grouped)([Example("a", "a", "", "")], Full())


def test_an_opt_without_enough_positions_is_refused_by_name() -> None:
    model = early_opt(random_opt())
    for decoder in (OneDecoder, BatchDecoder):
        with pytest.raises(ConfigError, match="sources of up to 16 tokens and answers of up to 50 do not fit"):
            decoder(model, max_new_tokens=50)
        decoder(model, max_new_tokens=49)
