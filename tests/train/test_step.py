"""One optimizer step is one mean over all its tokens, however it is cut; what is not finite is never applied."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file, save_file

from calm.config import ExitLoss, FinetuneConfig
from calm.data.text import encode_source
from calm.models.t5 import EarlyExitT5
from calm.records import Example
from tests.train.model import tiny_model
from tests.train.tiny import run_processes
from train.batches import Feed
from train.step import SpeakingLoss, Stepper, StepResult

VARIANTS = {
    "weighted": {},
    "uniform": {"loss": ExitLoss.uniform},
    "last_plus_mean": {"loss": ExitLoss.last_plus_mean},
    "final_only": {"loss": ExitLoss.final_only},
    "rotating": {"rotate": 1},
    "distilled": {"distill": 0.5},
}
# targets of 1 and 3 tokens, EOS included: their mean of means is not the mean over tokens
ROWS = [Example("short", "short", "a b", ""), Example("long", "long", "c d e a b", "ab e")]


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def stepper(model: EarlyExitT5, rows: list[Example], **settings: Any) -> Stepper:
    """SGD, so that the weights show the gradient's scale."""
    config = FinetuneConfig(batch_size=len(rows), clip_norm=1e9, **settings)
    model.classifier.requires_grad_(False)
    loss = SpeakingLoss(model, config, seed=3)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped, optimizer = accelerator.prepare(loss, optimizer)
    wrapped.train()
    return Stepper(accelerator, loss, wrapped, optimizer, Feed(model, rows, len(rows), 0), config, seed=3)


def one_step(accumulation: int, **settings: Any) -> tuple[StepResult, dict[str, torch.Tensor]]:
    model = tiny_model()
    result = stepper(model, ROWS, accumulation=accumulation, **settings).take([0, 1], step=5)
    return result, {name: value.clone() for name, value in model.hf.state_dict().items()}


def pair_job(folder: Path) -> None:
    """In each of two processes: one row, one step, for every variant; the first writes what came out."""
    for name, settings in VARIANTS.items():
        result, weights = one_step(1, **settings)
        if Accelerator(cpu=True).is_main_process:
            save_file(
                {key: value.contiguous().clone() for key, value in weights.items()}, folder / f"{name}.safetensors"
            )
            (folder / f"{name}.json").write_text(json.dumps({"loss": result.loss, "layers": result.layer_losses}))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    assert run_processes(2, pair_job, folder, log=folder / "log") == [0, 0], (folder / "log").read_text()
    return folder


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_rows_at_once_in_turn_and_in_two_processes_are_one_step(variant: str, pair: Path) -> None:
    whole, weights = one_step(1, **VARIANTS[variant])
    assert whole.tokens == 1 + len(Feed(tiny_model(), ROWS, 2, 0).targets([1])[0]) and whole.applied
    in_turn, turn_weights = one_step(2, **VARIANTS[variant])
    in_pair = json.loads((pair / f"{variant}.json").read_text())
    assert in_turn.loss == pytest.approx(whole.loss, abs=1e-6) and in_pair["loss"] == pytest.approx(
        whole.loss, abs=1e-6
    )
    assert {int(k): v for k, v in in_pair["layers"].items()} == pytest.approx(whole.layer_losses, abs=1e-6)
    pair_weights = load_file(pair / f"{variant}.safetensors")
    before = tiny_model().hf.state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(turn_weights[name], value, atol=1e-6, rtol=0)
        torch.testing.assert_close(pair_weights[name], value, atol=1e-6, rtol=0)
    assert any((before[name] - value).abs().max() > 1e-3 for name, value in weights.items())


def test_the_loss_is_the_mean_over_tokens_not_over_rows() -> None:
    both, _ = one_step(1)
    alone = [stepper(tiny_model(), [row]).take([0], step=5) for row in ROWS]
    sums = sum(each.loss * each.tokens for each in alone)
    assert both.loss == pytest.approx(sums / both.tokens, abs=1e-6)
    assert both.loss != pytest.approx(sum(each.loss for each in alone) / 2, abs=1e-3)


def test_more_parts_than_rows_change_nothing() -> None:
    _, weights = one_step(1)
    model = tiny_model()
    stepper(model, ROWS, accumulation=3).take([0, 1], step=5)
    for name, value in model.hf.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=0)


def test_dropout_is_a_function_of_seed_and_step() -> None:
    def losses(steps: list[int]) -> list[float]:
        torch.manual_seed(len(steps))  # whatever happened before
        return [stepper(tiny_model(dropout=0.3), ROWS).take([0, 1], step=step).loss for step in steps]

    first, again = losses([4, 5]), losses([5])
    assert first[1] == again[0] and first[0] != first[1]


class Poisoned(EarlyExitT5):
    """Says NaN for a source that holds the token of ``poison``."""

    poison: int = -1

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = super().encode(input_ids, attention_mask)
        bad = (input_ids == self.poison).any(1)
        return torch.where(bad[:, None, None], torch.full_like(hidden, float("nan")), hidden)


def poisoned_model() -> Poisoned:
    model = tiny_model()
    model.__class__ = Poisoned
    assert isinstance(model, Poisoned)
    short, long = (set(encode_source(model.tokenizer, row.source, model.settings)) for row in ROWS)
    model.poison = min(long - short)
    return model


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_poisoned_row_is_named_and_changes_nothing(accumulation: int) -> None:
    model = poisoned_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = stepper(model, ROWS, accumulation=accumulation).take([0, 1], step=0)
    assert not result.applied and result.bad_rows == ("long",) and not math.isfinite(result.loss)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.hf.parameters())


def test_a_finite_loss_with_infinite_gradients_is_not_applied() -> None:
    model = tiny_model()
    hooked = next(model.hf.parameters())
    hooked.register_hook(lambda gradient: gradient * float("inf"))
    result = stepper(model, ROWS).take([0, 1], step=0)
    assert not result.applied and math.isfinite(result.loss) and result.bad_rows == ("short", "long")


def test_a_signal_of_any_process_is_heard() -> None:
    assert stepper(tiny_model(), ROWS).take([0, 1], step=0, received=15).signal == 15


def test_a_filler_adds_nothing_unless_its_row_is_bad_itself() -> None:
    model = tiny_model()
    taken = stepper(model, ROWS)
    targets = taken._feed.targets([1])
    filler = taken._feed.batch([1], targets, counted=False)
    total, told = taken._loss(filler, 0)
    total.backward()
    assert total.item() == 0.0 and told.tolist()[:-1] == [0.0] * model.num_layers
    assert all(not p.grad.any() for p in model.hf.parameters() if p.grad is not None)
    with torch.no_grad():
        model.hf.shared.weight[filler.source_ids[0, 0]] = float("nan")
    assert math.isnan(taken._loss(filler, 0)[0].item())  # never hidden: the step is bad wherever the row is counted
