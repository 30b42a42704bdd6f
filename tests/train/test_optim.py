"""Learning rates by optimizer step; optimizer states that survive the way to disk and back."""

from pathlib import Path

import pytest
import torch

from calm.config import FinetuneConfig, LrSchedule, OptimizerName
from calm.errors import CheckpointError
from train.optim import (
    build_optimizer,
    learning_rate,
    load_optimizer,
    names_in_order,
    optimizer_state,
    save_optimizer,
    set_rate,
)


def test_linear_decay_is_at_three_quarters_after_a_quarter() -> None:
    config = FinetuneConfig(steps=100, warmup_steps=0, lr=2.0)
    assert learning_rate(config, 25) == pytest.approx(1.5)
    assert learning_rate(config, 0) == 2.0 and learning_rate(config, 100) == 0.0


def test_the_rate_does_not_know_accumulation() -> None:
    one, three = (FinetuneConfig(steps=50, warmup_steps=5, accumulation=n) for n in (1, 3))
    assert [learning_rate(one, step) for step in range(50)] == [learning_rate(three, step) for step in range(50)]


def test_warm_up_begins_above_zero_and_ends_at_the_peak() -> None:
    config = FinetuneConfig(steps=100, warmup_steps=4, lr=1.0)
    assert [learning_rate(config, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(FinetuneConfig(steps=3, warmup_steps=200, lr=1.0), 2) == 1.0


def test_cosine_and_constant() -> None:
    cosine = FinetuneConfig(steps=100, warmup_steps=0, lr=1.0, lr_schedule=LrSchedule.cosine)
    assert learning_rate(cosine, 50) == pytest.approx(0.5) and learning_rate(cosine, 100) == pytest.approx(0.0)
    constant = FinetuneConfig(steps=100, warmup_steps=0, lr=1.0, lr_schedule=LrSchedule.constant)
    assert learning_rate(constant, 99) == 1.0


def problem(kind: OptimizerName) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[str]]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = build_optimizer(module.named_parameters(), FinetuneConfig(optimizer=kind, lr=1e-2))
    return module, optimizer, names_in_order(module.named_parameters(), optimizer)


def advance(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", list(OptimizerName))
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: OptimizerName) -> None:
    module, optimizer, names = problem(kind)
    advance(module, optimizer, 3, seed=1)
    save_optimizer(tmp_path, *optimizer_state(optimizer, names), kind.value)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    advance(module, optimizer, 3, seed=2)

    again, restored, _ = problem(kind)
    again.load_state_dict(weights)
    load_optimizer(tmp_path, restored, names, kind.value)
    set_rate(restored, 1e-2)
    advance(again, restored, 3, seed=2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not list(tmp_path.glob("*.p*"))


def test_a_state_of_another_optimizer_or_shape_is_refused(tmp_path: Path) -> None:
    module, optimizer, names = problem(OptimizerName.adamw)
    advance(module, optimizer, 1, seed=1)
    save_optimizer(tmp_path, *optimizer_state(optimizer, names), "adamw")
    with pytest.raises(CheckpointError, match="state of adamw, the run uses adafactor"):
        load_optimizer(tmp_path, optimizer, names, "adafactor")
    with pytest.raises(CheckpointError, match="which the model lacks"):
        load_optimizer(tmp_path, optimizer, [f"x.{name}" for name in names], "adamw")
    other = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(3, 4\) there, \(3, 5\) in the model"):
        load_optimizer(tmp_path, build_optimizer(other.named_parameters(), FinetuneConfig()), names, "adamw")


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """One step of each part equals torch's own optimizer on the same gradients, at the rate that is set."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 3), "shared": torch.nn.Embedding(5, 4)})
    alone = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    optimizer = build_optimizer(module.named_parameters(), FinetuneConfig(optimizer=OptimizerName.muon, lr=1.0))
    assert names_in_order(module.named_parameters(), optimizer) == ["layer.weight", "layer.bias", "shared.weight"]
    muon = torch.optim.Muon([alone["layer.weight"]], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([alone["layer.bias"], alone["shared.weight"]], lr=0.01, weight_decay=0.0)
    set_rate(optimizer, 0.01)
    for _ in range(2):
        for name, parameter in module.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            alone[name].grad = parameter.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, alone[name]), name
