"""The complete model of a possibly sharded one: for validation and for saving."""

import copy

import torch
from torch import nn

from calm.models.speaking import SpeakingModel

from .optim import whole


def whole_model(model: SpeakingModel) -> SpeakingModel:
    """The model itself, or under FSDP a copy with full tensors. All processes must call it."""
    if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return model
    full = {id(parameter): nn.Parameter(whole(parameter.detach()), False) for parameter in model.parameters()}
    # by identity, so that a tied head stays tied; everything else is shared with the original
    memo: dict[int, object] = {**full, id(model.tokenizer): model.tokenizer, id(model.settings): model.settings}
    with torch.no_grad():
        return copy.deepcopy(model, memo)
