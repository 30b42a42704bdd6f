"""Training by a schedule: a position runs what decoding would run there, and the folder says which schedule that is."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import calm
from calm.config import Decay, ExitLoss, FinetuneConfig, Side, SkipScheduleConfig, Stage
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.layer_schedule import LayerSchedule
from calm.losses import IGNORED
from calm.models.cut import keep_first_layers
from calm.models.t5 import EarlyExitT5
from calm.policies import SkipSchedule
from calm.records import Example
from tests.scripted import early_exit, examples, random_t5
from tests.train.model import tiny_model
from tests.train.tiny import scores, tiny_config
from train.batches import Feed
from train.loop import prepare_model
from train.run import train
from train.step import SpeakingLoss

V, LAYERS, LENGTH = 97, 6, 12
SCHEDULES = [
    LayerSchedule(5, 2, LENGTH), LayerSchedule(4, 1, LENGTH, 0), LayerSchedule(6, 3, LENGTH, 2, Decay.power),
    LayerSchedule(5, 1, LENGTH, side=Side.bottom),
]  # fmt: skip


def padded(model: EarlyExitT5, rows: list[Example]) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    sources = [[*model.tokenizer(row.source)["input_ids"], 1] for row in rows]
    longest = max(map(len, sources))
    ids = torch.tensor([[*source, *[0] * (longest - len(source))] for source in sources])
    mask = torch.tensor([[i < len(source) for i in range(longest)] for source in sources])
    return sources, ids, mask


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_teacher_forcing_has_the_decoders_hiddens_at_every_step(schedule: LayerSchedule) -> None:
    model = early_exit(random_t5(seed=3, decoder_layers=LAYERS).double(), length=LENGTH)  # exact but for 1e-12
    rows = examples(V, 3, seed=4)
    sources, ids, mask = padded(model, rows)
    fed = torch.cat([torch.zeros(3, 1, dtype=torch.long), torch.randint(3, V, (3, LENGTH - 1))], dim=1)
    with torch.inference_mode():
        forced = model.decoder_hiddens(model.encode(ids, mask), mask, fed, schedule.reach(LENGTH, LAYERS))
        adapter = OneDecoder(model).adapter
        for row, source in enumerate(sources):
            state = adapter.prefill(source)
            for step in range(LENGTH):
                hidden, ran = adapter.embed(int(fed[row, step]), step), schedule.layers(step, LAYERS)
                for layer in range(1, LAYERS + 1):
                    if layer in ran:
                        hidden = adapter.layer(layer, hidden, state, step)
                    torch.testing.assert_close(forced[layer - 1][row, step], hidden[0, 0], rtol=0.0, atol=1e-10)


def test_without_a_schedule_every_position_runs_every_layer() -> None:
    model = early_exit(random_t5(seed=3, decoder_layers=LAYERS), length=LENGTH)
    _, ids, mask = padded(model, examples(V, 2, seed=4))
    fed = torch.randint(3, V, (2, LENGTH))
    encoded = model.encode(ids, mask)
    plain, whole = model.decoder_hiddens(encoded, mask, fed), model.decoder_hiddens(encoded, mask, fed, [99] * LAYERS)
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))


@pytest.mark.parametrize("side", list(Side))
def test_the_loss_is_that_of_the_layer_that_speaks(side: Side) -> None:
    """Of the very words that the decoder would have to say, by its own logits; padding counts nothing."""
    model = tiny_model()
    config = FinetuneConfig(loss=ExitLoss.final_only, skip_schedule=SkipScheduleConfig(2, 1, side=side))
    rows = [Example("a", "a", "a b", "ab c d"), Example("b", "b", "c d e a b", "e")]
    feed = Feed(model, rows, 2, 0)
    batch = feed.batch([0, 1], feed.targets([0, 1]))
    total, sums = SpeakingLoss(prepare_model(model, config).eval(), config, 0)(batch, 0)
    schedule = LayerSchedule(2, 1, model.settings.max_target_tokens, side=side)
    adapter, by_hand = OneDecoder(model).adapter, 0.0
    with torch.inference_mode():
        for row in range(2):
            kept = int(batch.source_mask[row].sum())
            state = adapter.prefill(batch.source_ids[row, :kept].tolist())
            for step, (token, label) in enumerate(zip(batch.decoder_ids[row], batch.labels[row], strict=True)):
                hidden = adapter.embed(int(token), step)
                for layer in schedule.layers(step, 3):
                    hidden = adapter.layer(layer, hidden, state, step)
                if label != IGNORED:
                    by_hand += float(F.cross_entropy(adapter.logits(hidden)[0], label[None]))
    assert total.item() == pytest.approx(by_hand, rel=1e-5)
    assert sums[:2].isnan().all() and float(sums[2]) == pytest.approx(by_hand, rel=1e-5)


def test_every_layer_learns_though_few_positions_run_it() -> None:
    model = tiny_model()
    config = FinetuneConfig(loss=ExitLoss.final_only, skip_schedule=SkipScheduleConfig(1, 1, 0))
    feed = Feed(model, [Example("a", "a", "a b", "ab c d")], 1, 0)
    total, _ = SpeakingLoss(prepare_model(model, config), config, 0)(feed.batch([0], feed.targets([0])), 0)
    total.backward()
    learnt = [name for name, value in model.hf.decoder.named_parameters() if value.grad is not None]
    assert len(learnt) == len(list(model.hf.decoder.parameters()))


def test_a_run_validates_and_writes_what_it_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = SkipScheduleConfig(2, 1, side=Side.bottom)
    config = tiny_config(finetune__loss=ExitLoss.final_only, finetune__skip_schedule=asked)
    assert train(config, tmp_path) == 0
    assert "scheduled ROUGE-L" in capsys.readouterr().err and set(scores(tmp_path)) == {3, 6}
    model = calm.load(tmp_path / "model")
    assert model.settings.skip_schedule is not None
    schedule = LayerSchedule.from_json(model.settings.skip_schedule)
    assert schedule == LayerSchedule(2, 1, 8, side=Side.bottom)
    (trace,) = calm.BatchDecoder(model)([Example("a", "a", "the food", "")], SkipSchedule(schedule))
    assert set(trace.executed_layers[1:]) <= {1, 2}
    assert "Trained by a schedule of layers" in (tmp_path / "model/README.md").read_text()
    assert keep_first_layers(model, 2).settings.skip_schedule is None


def test_a_schedule_deeper_than_the_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_config(finetune__loss=ExitLoss.final_only, finetune__skip_schedule=SkipScheduleConfig(4, 2))
    with pytest.raises(ConfigError, match="max_layers=4 exceeds the model's 3 decoder layers"):
        train(config, tmp_path)
    assert config.stage is Stage.finetune and not (tmp_path / "checkpoints").exists()
