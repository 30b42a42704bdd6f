"""Decoding by a schedule of layers: just those run, nothing is filled in, batch equals one, metrics count what ran."""

from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from calm.batch_layers import BatchLayers
from calm.config import Backfill, Measure
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError
from calm.layer_schedule import Decay, LayerSchedule, Side
from calm.metrics import depth_summary
from calm.models.t5 import EarlyExitT5
from calm.policies import Confident, Full, Oracle, SkipSchedule, Static, scheduled_layers
from calm.records import layers_not_run, layers_skipped
from calm.thresholds import ThresholdSchedule
from tests.scripted import early_exit, examples, random_t5

V, LAYERS, LENGTH = 97, 6, 12
SCHEDULES = {
    "top": LayerSchedule(5, 2, LENGTH),
    "no-warm-up": LayerSchedule(4, 1, LENGTH, 0),
    "two-warm-up": LayerSchedule(6, 3, LENGTH, 2),
    "power": LayerSchedule(6, 2, LENGTH, decay=Decay.power),
    "bottom": LayerSchedule(5, 2, LENGTH, side=Side.bottom),
    "warm-up-alone": LayerSchedule(4, 2, LENGTH, 2),
}
chosen = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@pytest.fixture(scope="module")
def model() -> EarlyExitT5:
    return early_exit(random_t5(seed=1, decoder_layers=LAYERS), length=LENGTH)


def essence(trace: Any) -> tuple[Any, ...]:
    return trace.id, trace.tokens, trace.crossing_layers, trace.executed_layers, trace.backfilled_layers, trace.finished


@chosen
def test_batch_equals_one(model: EarlyExitT5, schedule: LayerSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, policy = examples(V, 9, seed=6), SkipSchedule(schedule)
    said = [t.tokens for t in OneDecoder(model)(rows, policy)]
    ends = min((t for tokens in said for t in tokens), key=lambda t: abs(sum(t in tokens for tokens in said) - 5))
    monkeypatch.setattr(model.hf.config, "eos_token_id", ends)  # about half of the rows end, and leave the batch
    one = OneDecoder(model)(rows, policy)
    assert [essence(t) for t in BatchDecoder(model, batch_size=4)(rows, policy)] == [essence(t) for t in one]
    assert len({len(t.tokens) for t in one}) > 1, "rows must leave the batch at different positions"
    assert [t.tokens for t in one] != [t.tokens for t in OneDecoder(model)(rows, Full())]


@chosen
def test_the_layers_that_run_are_the_schedules(model: EarlyExitT5, schedule: LayerSchedule) -> None:
    decoder = OneDecoder(model)
    ran: list[tuple[int, int]] = []
    layer = decoder.adapter.layer

    def spy(index: int, hidden: torch.Tensor, state: Any, step: int) -> torch.Tensor:
        assert state.cache.self_attention_cache.get_seq_length(index - 1) == step, "an earlier position has no K and V"
        ran.append((step, index))
        return layer(index, hidden, state, step)

    decoder.adapter.layer = spy  # type: ignore[method-assign]
    (trace,) = decoder(examples(V, 1, seed=7), SkipSchedule(schedule))
    steps = range(len(trace.tokens))
    assert ran == [(step, layer) for step in steps for layer in schedule.layers(step, LAYERS)]
    assert trace.executed_layers == (LAYERS, *(schedule.count(step - 1) for step in steps[1:]))
    assert trace.emission_layers == trace.crossing_layers == tuple(schedule.layers(s, LAYERS)[-1] for s in steps)
    assert set(trace.backfilled_layers) == {0}


@chosen
@pytest.mark.parametrize("backfill", [Backfill.project, Backfill.true])
def test_the_cache_holds_what_ran_and_nothing_else(
    model: EarlyExitT5, schedule: LayerSchedule, backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[BatchLayers] = []
    make = BatchLayers.__init__

    def spy(self: BatchLayers, *given: Any) -> None:
        make(self, *given)
        kept.append(self)

    monkeypatch.setattr(BatchLayers, "__init__", spy)
    (trace,) = BatchDecoder(model, backfill=backfill)(examples(V, 1, seed=7), SkipSchedule(schedule))
    (layers,) = kept
    for cache in (layers.keys, layers.values):
        written = ~cache.isnan().any(dim=-1)  # (L, 1, H, steps)
        reach = [int(each) for each in written[:, 0].all(dim=1).sum(dim=-1)]
        assert tuple(reach) == schedule.reach(len(trace.tokens), LAYERS)
        assert int(written.sum()) == sum(reach) * written.shape[2]


def cut(hf: T5ForConditionalGeneration, layers: list[int]) -> T5ForConditionalGeneration:
    hf.decoder.block = torch.nn.ModuleList([hf.decoder.block[layer - 1] for layer in layers])
    hf.config.num_decoder_layers = hf.decoder.config.num_layers = len(layers)
    for number, block in enumerate(hf.decoder.block):
        block.layer[0].SelfAttention.layer_idx = block.layer[1].EncDecAttention.layer_idx = number
    return hf


def test_full_width_and_a_fixed_bottom_are_known_policies(model: EarlyExitT5) -> None:
    """All layers everywhere is full depth; the first k everywhere is a static depth from the second token on."""
    rows = examples(V, 6, seed=8)
    full = [t.tokens for t in OneDecoder(model)(rows, Full())]
    for side in Side:
        every = SkipSchedule(LayerSchedule(LAYERS, LAYERS, LENGTH, side=side))
        assert [t.tokens for t in OneDecoder(model)(rows, every)] == full
    short = Static(3), SkipSchedule(LayerSchedule(3, 3, LENGTH, side=Side.bottom))
    seconds = []
    for policy in short:
        decoder = OneDecoder(model, max_new_tokens=1)
        seconds.append([t.tokens for t in decoder(rows, policy)])
    assert seconds[1] == [t[:1] for t in full] != seconds[0]


def test_a_fixed_set_of_layers_is_a_model_of_those_layers(model: EarlyExitT5) -> None:
    """From the second position on; the first runs them all, so the cut model is given its K and V by the schedule."""
    schedule = LayerSchedule(3, 3, LENGTH)
    hf = cut(random_t5(seed=1, decoder_layers=LAYERS), [1, 5, 6])
    (row,) = examples(V, 1, seed=9)
    mine, small = OneDecoder(model), OneDecoder(early_exit(hf, length=LENGTH))
    ids = [*model.tokenizer(row.source)["input_ids"], 1]
    state, other = mine.adapter.prefill(ids), small.adapter.prefill(ids)
    hidden = mine.adapter.embed(0, 0)
    for layer in schedule.layers(0, LAYERS):
        hidden = mine.adapter.layer(layer, hidden, state, 0)
    for place, layer in enumerate((1, 5, 6), start=1):
        small.adapter.layer(place, hidden, other, 0)
        small.adapter.write_kv(place, other, 0, *mine.adapter.read_kv(layer, state, 0))
    left = right = mine.adapter.embed(7, 1)
    for place, layer in enumerate(scheduled_layers(SkipSchedule(schedule), 1, LAYERS), start=1):
        left, right = mine.adapter.layer(layer, left, state, 1), small.adapter.layer(place, right, other, 1)
        torch.testing.assert_close(left, right)


def test_every_metric_counts_the_layers_that_ran(model: EarlyExitT5) -> None:
    rows = examples(V, 5, seed=10)
    for name in ("top", "bottom"):
        schedule = SCHEDULES[name]
        traces = BatchDecoder(model)(rows, SkipSchedule(schedule))
        counts = [len(schedule.layers(step, LAYERS)) for t in traces for step in range(len(t.tokens))]
        share = 1 - sum(counts) / len(counts) / LAYERS
        assert layers_skipped(traces, LAYERS) == pytest.approx(share) == layers_not_run(traces, LAYERS)
        depth = depth_summary(traces, LAYERS)
        assert depth["mean_layers"] == depth["mean_executed"] == pytest.approx(sum(counts) / len(counts))
        assert depth["mean_backfilled"] == 0.0
    assert set(BatchDecoder(model)(rows, SkipSchedule(SCHEDULES["top"]))[0].emission_layers) == {LAYERS}


@pytest.mark.parametrize("backfill", [Backfill.project, Backfill.true])
def test_of_exits_the_emission_layer_still_counts(model: EarlyExitT5, backfill: Backfill) -> None:
    """Layers that ran for a row's mates, for the oracle or for true K and V gave no token."""
    rows = examples(V, 8, seed=11)
    for policy in (Confident(Measure.softmax, ThresholdSchedule(0.3)), Oracle(), Static(2), Full()):
        for decoder in (OneDecoder(model, backfill=backfill), BatchDecoder(model, backfill=backfill)):
            for trace in decoder(rows, policy):
                assert trace.own_layers == trace.emission_layers


def test_confidences_are_recorded_as_not_computed(model: EarlyExitT5) -> None:
    policy = SkipSchedule(SCHEDULES["top"])
    for decoder in (OneDecoder(model, record_confidences=True), BatchDecoder(model, record_confidences=True)):
        for trace in decoder(examples(V, 2), policy):
            assert len(trace.confidences) == len(trace.tokens)
            assert all(value != value for step in trace.confidences for value in step)


def test_a_schedule_deeper_than_the_model_is_refused(model: EarlyExitT5) -> None:
    policy = SkipSchedule(LayerSchedule(9, 2, LENGTH))
    for decoder in (OneDecoder(model), BatchDecoder(model)):
        with pytest.raises(ConfigError, match="max_layers=9 exceeds the model's 6 decoder layers"):
            decoder(examples(V, 1), policy)
