"""Training decoder-only models from scratch, with and without a schedule, and what may not follow a schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import calm
from calm.config import (
    Architecture,
    CalibrateConfig,
    ExitLoss,
    FinetuneConfig,
    ModelConfig,
    ShapeConfig,
    Side,
    SkipScheduleConfig,
    Stage,
    Table1Config,
    TrackingConfig,
    TrackingMode,
    TrainConfig,
)
from calm.data.tokenizer import train_tokenizer
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.experiment_config import ThresholdsConfig
from calm.layer_schedule import LayerSchedule
from calm.losses import IGNORED
from calm.models.build import build_from_scratch
from calm.models.causal import CausalModel
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.policies import SkipSchedule
from calm.records import Example
from eval import calibrate, table1, thresholds
from tests.train.tiny import scores, tiny_config
from train.batches import Feed
from train.loop import prepare_model
from train.run import train
from train.step import SpeakingLoss

LAYERS = 3
SHAPE = ShapeConfig(
    architecture=Architecture.llama, vocab_size=100, d_model=16, d_kv=8, num_heads=2, num_kv_heads=1, d_ff=32,
    num_layers=0, num_decoder_layers=LAYERS, dropout_rate=0.1, lowercase=True,
)  # fmt: skip
ROWS = [Example("a", "a", "a b", "ab c d"), Example("b", "b", "c d e a b", "e")]


def llama() -> CausalModel:
    tokenizer = train_tokenizer(["a b c d e ab bc cd de abc bcd"] * 60, 60)
    settings = EarlyExitSettings(default_exit_layers(LAYERS), max_source_tokens=16, max_target_tokens=8)
    torch.manual_seed(0)
    model = build_from_scratch(SHAPE, tokenizer, settings)
    assert isinstance(model, CausalModel)
    return model


def config_of(**changes: Any) -> TrainConfig:
    return tiny_config(model=ModelConfig(name="test", shape=SHAPE), **changes)


def scheduled(**changes: Any) -> TrainConfig:
    return config_of(finetune__loss=ExitLoss.final_only, finetune__skip_schedule=SkipScheduleConfig(2, 1), **changes)


@pytest.mark.parametrize("side", list(Side))
def test_the_loss_is_that_of_the_layer_that_speaks(side: Side) -> None:
    """Of the very words that the decoder would have to say, by its own logits; padding counts nothing."""
    model = llama()
    config = FinetuneConfig(loss=ExitLoss.final_only, skip_schedule=SkipScheduleConfig(2, 1, side=side))
    feed = Feed(model, ROWS, 2, 0)
    batch = feed.batch([0, 1], feed.targets([0, 1]))
    total, sums = SpeakingLoss(prepare_model(model, config).eval(), config, 0)(batch, 0)
    schedule = LayerSchedule(2, 1, model.settings.max_target_tokens, side=side)
    adapter, by_hand = OneDecoder(model).adapter, 0.0
    with torch.inference_mode():
        for row in range(2):
            kept = int(batch.source_mask[row].sum())
            state = adapter.prefill(batch.source_ids[row, :kept].tolist())
            for step, (token, label) in enumerate(zip(batch.decoder_ids[row], batch.labels[row], strict=True)):
                hidden = adapter.prompt_hidden(state)
                if step:
                    hidden = adapter.embed(int(token), step, state)
                    for layer in schedule.layers(step, LAYERS):
                        hidden = adapter.layer(layer, hidden, state, step)
                assert hidden is not None
                if label != IGNORED:
                    by_hand += float(F.cross_entropy(adapter.logits(hidden)[0], label[None]))
    assert total.item() == pytest.approx(by_hand, rel=1e-5)
    assert sums[:2].isnan().all() and float(sums[2]) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("schedule", [SkipScheduleConfig(), SkipScheduleConfig(2, 1), SkipScheduleConfig(1, 1, 0)])
def test_it_learns_and_every_layer_does(schedule: SkipScheduleConfig) -> None:
    model = llama()
    config = FinetuneConfig(loss=ExitLoss.final_only, skip_schedule=schedule, dropout_rate=0.0)
    feed = Feed(model, ROWS, 2, 0)
    batch = feed.batch([0, 1], feed.targets([0, 1]))
    loss = SpeakingLoss(prepare_model(model, config), config, 0)
    optimizer = torch.optim.AdamW(model.hf.parameters(), lr=1e-2)
    values = []
    for step in range(25):
        total, _ = loss(batch, step)
        total.backward()
        assert all(value.grad is not None for value in model.hf.parameters())
        optimizer.step()
        optimizer.zero_grad()
        values.append(total.item())
    assert values[-1] < values[0] / 3


def test_its_dropout_is_what_training_asks_for() -> None:
    model = prepare_model(llama(), FinetuneConfig(dropout_rate=0.3))
    assert model.hf.config.attention_dropout == 0.3 and not hasattr(model.hf.config, "dropout_rate")
    assert all(layer.self_attn.attention_dropout == 0.3 for layer in model.hf.model.layers)


def test_a_run_from_scratch_goes_on_with_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config_of(), tmp_path / "base") == 0
    base = calm.load(tmp_path / "base/model")
    assert isinstance(base, CausalModel) and base.settings.source_end == [base.eos_token_id]
    asked = scheduled(checkpoint=str(tmp_path / "base/model"))
    asked.model = None
    assert train(asked, tmp_path / "arm") == 0
    assert "scheduled ROUGE-L" in capsys.readouterr().err and set(scores(tmp_path / "arm")) == {3, 6}
    model = calm.load(tmp_path / "arm/model")
    assert model.settings.skip_schedule is not None and model.settings.source_end == base.settings.source_end
    schedule = LayerSchedule.from_json(model.settings.skip_schedule)
    assert schedule == LayerSchedule(2, 1, 8)
    (trace,) = calm.BatchDecoder(model, ignore_eos=True)([Example("a", "a", "the food", "")], SkipSchedule(schedule))
    assert trace.executed_layers == (LAYERS, *(schedule.count(step - 1) for step in range(1, 8)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that was trained by a schedule."""
    parent = tmp_path_factory.mktemp("scheduled")
    assert train(scheduled(finetune__steps=1), parent) == 0
    return parent / "model"


@pytest.mark.parametrize("stage", [Stage.classifier, Stage.calibrate])
def test_no_later_stage_follows_a_schedule(folder: Path, stage: Stage, tmp_path: Path) -> None:
    config = config_of(checkpoint=str(folder), stage=stage, processes=1)
    config.model = None
    with pytest.raises(ConfigError, match="was trained by a schedule of layers .* so it has no exits"):
        train(config, tmp_path)


def test_no_threshold_is_sought_on_such_a_folder(folder: Path, tmp_path: Path) -> None:
    off = TrackingConfig(mode=TrackingMode.disabled)
    why = "was trained by a schedule of layers .* so it has no exits"
    with pytest.raises(ConfigError, match=f"calibration: this model {why}"):
        calibrate.run(CalibrateConfig(str(folder), processes=1, tracking=off), tmp_path)
    with pytest.raises(ConfigError, match=f"eval.thresholds: this model {why}"):
        thresholds.run(ThresholdsConfig(str(folder)), tmp_path)
    with pytest.raises(ConfigError, match=f"eval.table1: this model {why}"):
        table1.run(Table1Config(str(folder), processes=1, tracking=off), tmp_path)


def test_training_without_a_schedule_frees_the_folder(folder: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint=str(folder), finetune__steps=1)
    config.model = None
    assert train(config, tmp_path) == 0
    assert calm.load(tmp_path / "model").settings.skip_schedule is None
