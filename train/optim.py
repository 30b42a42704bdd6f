"""Optimizers and the learning rate, which is a function of the optimizer step alone.

No scheduler object: a wrapped one advances once per process or per micro-batch, a function cannot.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from calm.checkpoint import load_tensors, read_json, save_tensors, write_json
from calm.config import FinetuneConfig, LrSchedule, OptimizerName
from calm.errors import CheckpointError

from .muon import MuonAdamW

STATE, SCALARS = "optimizer.safetensors", "optimizer.json"


def learning_rate(config: FinetuneConfig, step: int) -> float:
    """Rate of the optimizer step with ``step`` steps before it: linear warm-up, then linear, cosine or constant."""
    warmup = min(config.warmup_steps, config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_schedule is LrSchedule.constant:
        return config.lr
    left = max(0.0, (config.steps - step) / max(1, config.steps - warmup))
    if config.lr_schedule is LrSchedule.linear:
        return config.lr * left
    return config.lr * 0.5 * (1 - math.cos(math.pi * left))


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: FinetuneConfig) -> torch.optim.Optimizer:
    """AdamW; Muon, which learns from scratch in fewer steps; or Adafactor as T5 was trained with.

    Adafactor is factored, its updates relative to each parameter's own size.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    parameters = [parameter for _, parameter in trained]
    betas = (0.9, config.beta2)
    if config.optimizer is OptimizerName.adamw:
        return torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    if config.optimizer is OptimizerName.muon:
        return MuonAdamW(trained, config.lr, betas, config.weight_decay)
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(
        parameters, lr=config.lr, weight_decay=config.weight_decay, relative_step=False, scale_parameter=True
    )
    return optimizer


def names_in_order(named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in its own order, in which its state is numbered."""
    names = {id(parameter): name for name, parameter in named}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. Every process must call it, in the same order."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def optimizer_state(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State by parameter name: tensors ``<parameter>/<key>`` and, for the rest, JSON-ready values.

    Args:
        names: of the trained parameters, in the optimizer's order.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{names[index]}/{key}"] = whole(value)
            else:
                scalars.setdefault(names[index], {})[key] = value
    return tensors, scalars


def save_optimizer(folder: Any, tensors: dict[str, Tensor], scalars: dict[str, Any], kind: str) -> None:
    """``folder``/optimizer.safetensors and optimizer.json; ``kind`` is the optimizer's name."""
    save_tensors(folder / STATE, {name: tensor.clone() for name, tensor in tensors.items()})
    write_json(folder / SCALARS, {"kind": kind, "scalars": scalars})


def load_optimizer(folder: Any, optimizer: torch.optim.Optimizer, names: list[str], kind: str) -> None:
    """Put a saved state back.

    Raises CheckpointError when it belongs to another optimizer or to parameters of other names or shapes.
    """
    document = read_json(folder / SCALARS)
    if document["kind"] != kind:
        raise CheckpointError(
            f"{folder} holds the state of {document['kind']}, the run uses {kind}; "
            f"set finetune.optimizer={document['kind']} or start from its model with checkpoint="
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in load_tensors(folder / STATE).items():
        parameter, _, key = name.rpartition("/")
        if parameter not in names:
            raise CheckpointError(f"{folder / STATE} holds a state of {parameter}, which the model lacks")
        index = names.index(parameter)
        states.setdefault(index, {})[key] = _like(tensor, parameters[index])
    for parameter, values in document["scalars"].items():
        states.setdefault(names.index(parameter), {}).update(values)
    for index, state in states.items():
        moment = state.get("exp_avg_sq")
        if moment is not None and moment.shape != parameters[index].shape:
            raise CheckpointError(
                f"{folder / STATE}: {names[index]} has shape {tuple(moment.shape)} there, "
                f"{tuple(parameters[index].shape)} in the model"
            )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard ``tensor`` as its parameter is sharded, when it is."""
    if not hasattr(parameter, "placements") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
