"""Muon for the matrices inside the layers, AdamW for embeddings, head, norms and biases; one optimizer to its caller.

Muon (torch.optim.Muon) steps along the orthogonalised momentum of a matrix. With ``match_rms_adamw`` its updates have
the size of AdamW's, so that one learning rate serves both.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

TABLES = ("shared.", "embed_tokens.", "lm_head.", "relative_attention_bias.")  # looked up by row: no matrices to Muon


class MuonAdamW(torch.optim.Optimizer):
    """Two parameter groups, matrices and rest, each stepped by its own optimizer over the state kept here."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in named:
            table = parameter.ndim != 2 or any(part in name for part in TABLES)
            (rest if table else matrices).append(parameter)
        super().__init__([{"params": matrices}, {"params": rest}], {"lr": lr})
        self._parts = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay),
        ]
        self._share_state()

    def _share_state(self) -> None:
        for part in self._parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_state()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both parts at the rates of the groups here."""
        loss = closure() if closure is not None else None
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()
        return loss
