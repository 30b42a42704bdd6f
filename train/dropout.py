"""What is left out while training: units inside layers, and whole layers, each row for itself (LayerSkip)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor, nn

from calm.models.speaking import SpeakingModel
from calm.models.t5 import EarlyExitT5

OF_A_CONFIG = ("dropout_rate", "dropout", "attention_dropout")  # of T5; of OPT; of OPT and Llama
OF_A_MODULE = ("dropout", "attention_dropout")


def set_dropout(model: SpeakingModel, rate: float) -> None:
    """One rate for all dropout inside layers, whatever an architecture calls it; the config says it too."""
    for name in OF_A_CONFIG:
        if hasattr(model.hf.config, name):
            setattr(model.hf.config, name, rate)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in OF_A_MODULE:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


def decoder_layers(model: SpeakingModel) -> nn.ModuleList:
    """The stack that answers, whatever its architecture calls it."""
    return next(part for part in model.hf.get_decoder().children() if isinstance(part, nn.ModuleList))


def draw_kept(rates: Sequence[float], rows: int) -> Bool[Tensor, "layers rows"]:
    """Which rows run which layer 1..L: each left out at its rate, independently (2404.16710, equation 1)."""
    return torch.rand(len(rates), rows) >= torch.tensor(rates)[:, None]


@contextmanager
def only_kept(model: SpeakingModel, kept: Bool[Tensor, "layers rows"]) -> Iterator[None]:
    """Within, a decoder layer runs on the rows that keep it alone; the residual of the others passes it by.

    Nothing is scaled: equation 1 adds a layer's branch whole or not at all.
    """
    layers = decoder_layers(model)
    whole = {index: layers[index] for index, rows in enumerate(kept) if not bool(rows.all())}
    try:
        for index, layer in whole.items():
            layers[index] = _OfSomeRows(layer, kept[index].nonzero().squeeze(-1), isinstance(model, EarlyExitT5))
        yield
    finally:
        for index, layer in whole.items():
            layers[index] = layer


class _OfSomeRows(nn.Module):
    """A layer that only the rows ``chosen`` run. Around the layer, so that checkpointing inside it recomputes alike."""

    def __init__(self, layer: nn.Module, chosen: Tensor, tuples: bool) -> None:
        super().__init__()
        self.layer, self.chosen, self.tuples = layer, chosen, tuples

    def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Any:
        rows, chosen = len(hidden), self.chosen.to(hidden.device)
        nobody = len(chosen) == 0
        if nobody and not (dist.is_available() and dist.is_initialized()):
            return (hidden,) if self.tuples else hidden
        if nobody:  # DDP wants a gradient of every parameter, be it 0
            chosen = torch.zeros(1, dtype=torch.long, device=hidden.device)
        own = [_rows_of(each, rows, chosen) for each in given]
        out = self.layer(hidden[chosen], *own, **{name: _rows_of(each, rows, chosen) for name, each in named.items()})
        ran = out[0] if self.tuples else out
        joined = hidden + 0.0 * ran.sum() if nobody else hidden.index_copy(0, chosen, ran.to(hidden.dtype))
        return (joined,) if self.tuples else joined


def _rows_of(value: Any, rows: int, chosen: Tensor) -> Any:
    """The chosen rows of what a layer is given; what all rows share has one row and stays."""
    if isinstance(value, tuple):
        return tuple(_rows_of(each, rows, chosen) for each in value)
    return value[chosen] if isinstance(value, Tensor) and rows > 1 and value.ndim and len(value) == rows else value
