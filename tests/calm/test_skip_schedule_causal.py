"""A schedule of layers over decoder-only models: prompts at full depth, then just what it names, batch equals one."""

from typing import Any

import pytest
import torch

from calm.batch_causal import CausalLayers
from calm.data.collate import pad
from calm.data.text import encode_source
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError
from calm.layer_schedule import Decay, LayerSchedule, Side
from calm.metrics import depth_summary
from calm.models.causal import CausalModel
from calm.policies import Full, SkipSchedule
from tests.calm.comparing import V
from tests.causal import early_llama, early_opt, random_llama, random_opt
from tests.scripted import examples

LAYERS, LENGTH = 6, 12
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # Hugging Face's norms and softmax are fp32 whatever the model is in
SCHEDULES = {
    "top": LayerSchedule(5, 2, LENGTH),
    "no-warm-up": LayerSchedule(4, 1, LENGTH, 0),
    "two-warm-up": LayerSchedule(6, 3, LENGTH, 2),
    "power": LayerSchedule(6, 2, LENGTH, decay=Decay.power),
    "bottom": LayerSchedule(5, 2, LENGTH, side=Side.bottom),
}
chosen = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
MODELS = {
    "llama": lambda: early_llama(random_llama(seed=1, layers=LAYERS), length=LENGTH),
    "opt": lambda: early_opt(random_opt(seed=1, layers=LAYERS)),
    "opt-350m": lambda: early_opt(random_opt(seed=2, layers=LAYERS, pre_norm=False, words=12)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> CausalModel:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def llama() -> CausalModel:
    return MODELS["llama"]()


def essence(trace: Any) -> tuple[Any, ...]:
    return trace.id, trace.tokens, trace.crossing_layers, trace.executed_layers, trace.backfilled_layers, trace.finished


def cut(tokens: tuple[int, ...], end: int) -> int:
    """How long an answer is that ends with ``end``."""
    return (*tokens, end).index(end)


@chosen
def test_batch_equals_one(model: CausalModel, schedule: LayerSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, policy = examples(V, 9, seed=6), SkipSchedule(schedule)
    said = [t.tokens for t in OneDecoder(model, max_new_tokens=LENGTH)(rows, policy)]
    ends = max({t for tokens in said for t in tokens}, key=lambda t: len({cut(tokens, t) for tokens in said}))
    monkeypatch.setattr(type(model), "eos_token_id", ends)  # rows end and leave the batch, at places of their own
    one = OneDecoder(model, max_new_tokens=LENGTH)(rows, policy)
    batch = BatchDecoder(model, batch_size=4, max_new_tokens=LENGTH)(rows, policy)
    assert [essence(t) for t in batch] == [essence(t) for t in one]
    assert len({len(t.tokens) for t in one}) > 1, "rows must leave the batch at different positions"
    assert [t.tokens for t in one] != [t.tokens for t in OneDecoder(model, max_new_tokens=LENGTH)(rows, Full())]


@chosen
def test_the_layers_that_run_are_the_schedules(llama: CausalModel, schedule: LayerSchedule) -> None:
    decoder = OneDecoder(llama)
    ran: list[tuple[int, int]] = []
    layer = decoder.adapter.layer

    def spy(index: int, hidden: torch.Tensor, state: Any, step: int) -> torch.Tensor:
        assert state.cache.get_seq_length(index - 1) == state.position(step), "an earlier position has no K and V"
        ran.append((step, index))
        return layer(index, hidden, state, step)

    decoder.adapter.layer = spy  # type: ignore[method-assign]
    trace = max(decoder(examples(V, 4, seed=7), SkipSchedule(schedule)), key=lambda t: len(t.tokens))
    steps = range(1, len(trace.tokens))  # step 0 is the prompt's, which is read whole at full depth
    expected = [(step, layer) for step in steps for layer in schedule.layers(step, LAYERS)]
    assert len(expected) > 8 and set(expected) <= set(ran)
    assert trace.executed_layers == (LAYERS, *(schedule.count(step - 1) for step in steps))
    assert trace.emission_layers == (LAYERS, *(schedule.layers(step, LAYERS)[-1] for step in steps))
    assert set(trace.backfilled_layers) == {0}


@chosen
def test_the_cache_holds_what_ran_and_nothing_else(
    llama: CausalModel, schedule: LayerSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[CausalLayers] = []
    make = CausalLayers.__init__

    def spy(self: CausalLayers, *given: Any) -> None:
        make(self, *given)
        kept.append(self)

    monkeypatch.setattr(CausalLayers, "__init__", spy)
    (row,) = examples(V, 1, seed=7)
    (trace,) = BatchDecoder(llama, ignore_eos=True)([row], SkipSchedule(schedule))
    prompt = pad([encode_source(llama.tokenizer, row.source, llama.settings)])[0].shape[1]  # unseen padding behind it
    (layers,) = kept
    for cache in (layers.keys, layers.values):
        written = ~cache.isnan().any(dim=-1)  # (L, 1, KV heads, slots)
        reach = [int(each) for each in written[:, 0].all(dim=1).sum(dim=-1)]
        assert reach == [prompt - 1 + steps for steps in schedule.reach(len(trace.tokens), LAYERS)]
        assert int(written.sum()) == sum(reach) * written.shape[2]


@chosen
def test_teacher_forcing_has_the_decoders_hiddens_at_every_step(model: CausalModel, schedule: LayerSchedule) -> None:
    rows = examples(V, 3, seed=4)
    sources = [encode_source(model.tokenizer, row.source, model.settings) for row in rows]
    assert len({len(source) for source in sources}) > 1
    ids, mask = pad(sources)
    torch.manual_seed(0)
    fed = torch.randint(3, V, (3, LENGTH))
    with torch.inference_mode():
        forced = model.answer_hiddens(ids, mask, fed, schedule.reach(LENGTH, LAYERS))
        adapter = OneDecoder(model, max_new_tokens=LENGTH).adapter
        for row, source in enumerate(sources):
            state = adapter.prefill(source)
            torch.testing.assert_close(forced[-1][row, 0], state.hidden[0, 0], **CLOSE)
            for step in range(1, LENGTH):
                hidden, ran = adapter.embed(int(fed[row, step]), step, state), schedule.layers(step, LAYERS)
                for layer in range(1, LAYERS + 1):
                    if layer in ran:
                        hidden = adapter.layer(layer, hidden, state, step)
                    torch.testing.assert_close(forced[layer - 1][row, step], hidden[0, 0], **CLOSE)


def test_all_layers_everywhere_are_full_depth(model: CausalModel) -> None:
    rows = examples(V, 6, seed=8)
    full = [t.tokens for t in OneDecoder(model, max_new_tokens=LENGTH)(rows, Full())]
    for side in Side:
        every = SkipSchedule(LayerSchedule(LAYERS, LAYERS, LENGTH, side=side))
        assert [t.tokens for t in OneDecoder(model, max_new_tokens=LENGTH)(rows, every)] == full
    ids, mask = pad([encode_source(model.tokenizer, row.source, model.settings) for row in rows])
    fed = torch.randint(3, V, (len(rows), LENGTH))
    with torch.inference_mode():
        plain, whole = model.answer_hiddens(ids, mask, fed), model.answer_hiddens(ids, mask, fed, [LENGTH] * LAYERS)
    for left, right in zip(plain, whole, strict=True):
        torch.testing.assert_close(left, right)


def test_the_metrics_count_the_layers_that_ran(llama: CausalModel) -> None:
    schedule = SCHEDULES["top"]
    traces = BatchDecoder(llama)(examples(V, 5, seed=10), SkipSchedule(schedule))
    counts = [len(schedule.layers(step, LAYERS)) for t in traces for step in range(len(t.tokens))]
    depth = depth_summary(traces, LAYERS)
    assert depth["mean_layers"] == depth["mean_executed"] == pytest.approx(sum(counts) / len(counts))
    assert depth["mean_backfilled"] == 0.0


def test_a_schedule_deeper_than_the_model_is_refused(llama: CausalModel) -> None:
    for decoder in (OneDecoder(llama), BatchDecoder(llama)):
        with pytest.raises(ConfigError, match="max_layers=9 exceeds the model's 6 decoder layers"):
            decoder(examples(V, 1), SkipSchedule(LayerSchedule(9, 2, LENGTH)))
