"""One optimizer step: forward, backward over micro-batches and processes, one mean over all tokens, one update."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from calm.config import FinetuneConfig
from calm.layer_schedule import LayerSchedule
from calm.layerskip import drop_rates
from calm.losses import IGNORED, layer_losses
from calm.models.speaking import SpeakingModel
from calm.uniformity import exit_spread

from .batches import Batch, Feed, Share
from .dropout import draw_kept, only_kept


def schedule_of(model: SpeakingModel, config: FinetuneConfig) -> LayerSchedule | None:
    """The schedule that is trained, over the model's longest answer. Raises ConfigError where it exceeds the depth."""
    schedule = config.skip_schedule.over(model.settings.max_target_tokens)
    if schedule is not None:
        schedule.check_depth(model.num_layers)
    return schedule


class SpeakingLoss(nn.Module):
    """The model with its loss as ``forward``, so that DDP and FSDP see all parameters in use."""

    def __init__(self, model: SpeakingModel, config: FinetuneConfig, seed: int) -> None:
        super().__init__()
        self.model = model
        self._config, self._seed, self._schedule = config, seed, schedule_of(model, config)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Summed loss, 0-d, differentiable; sums to be told, (L + 1,), NaN where not computed: each layer's negative
        log-likelihood, and last the spread of the expected crossing layers (calm.uniformity).

        A filler keeps collectives in step and adds 0 wherever its loss and gradients are finite. Where they are not,
        NaN * 0 is NaN and the step is bad, which it is anyway: the row of a filler is counted in another part.
        """
        steps, schedule = batch.decoder_ids.shape[1], self._schedule
        reach = None if schedule is None else schedule.reach(steps, self.model.num_layers)
        with self._dropped(len(batch.source_ids), step):
            hiddens = self.model.answer_hiddens(batch.source_ids, batch.source_mask, batch.decoder_ids, reach)
        exits = self.model.settings.exit_layers
        parts = layer_losses(self.model, hiddens, batch.labels, self._config, step, self._seed, exits)
        total, uniformity = parts.total, self._config.uniformity
        sums = torch.full((self.model.num_layers + 1,), float("nan"), dtype=torch.float64, device=total.device)
        for layer, value in parts.per_layer.items():
            sums[layer - 1] = value
        if uniformity.weight:
            spread = exit_spread(hiddens, batch.labels != IGNORED, exits, self.model.logits, uniformity)
            total, sums[-1] = total + uniformity.weight * spread, spread.detach()
        return (total, sums) if batch.counted else (total * 0.0, sums * 0.0)

    def _dropped(self, rows: int, step: int) -> AbstractContextManager[None]:
        """Whole layers left out in training mode, drawn from the state that the step seeds."""
        dropout = self._config.layer_dropout
        if not (dropout.p_max and self.training):
            return nullcontext()
        rates = drop_rates(dropout, self.model.num_layers, step, self._config.steps)
        return only_kept(self.model, draw_kept(rates, rows))


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal in all processes.

    Attributes:
        loss: weighted loss per token of the whole step; NaN or infinite when the step was bad.
        layer_losses: layer -> plain negative log-likelihood per token, of the layers that the step computed.
        exit_spread: per token, where it is a part of the loss; else None.
        tokens: target tokens of the whole step, EOS included.
        bad_rows: ids of rows with a loss that is not finite, or all rows when only the gradients are not.
        applied: False when the update was skipped.
        signal: signal that some process received, or 0.
    """

    loss: float
    layer_losses: dict[int, float]
    exit_spread: float | None
    tokens: int
    grad_norm: float
    bad_rows: tuple[str, ...]
    applied: bool
    signal: int


class Stepper:
    """Takes optimizer steps. All processes call it with the same rows."""

    def __init__(
        self,
        accelerator: Accelerator,
        loss: SpeakingLoss,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        config: FinetuneConfig,
        seed: int,
    ) -> None:
        self._accelerator, self._loss, self._wrapped, self._optimizer = accelerator, loss, wrapped, optimizer
        self._feed, self._config, self._seed = feed, config, seed
        self._share = Share(accelerator.process_index, accelerator.num_processes, config.accumulation)
        self._trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]

    def take(self, rows: Sequence[int], step: int, received: int = 0) -> StepResult:
        """One step on these rows. ``received`` is this process's pending signal."""
        targets = self._feed.targets(rows)
        tokens = sum(len(target) for target in targets)
        micro = self._share.micro_batches(len(rows))
        layers = self._loss.model.num_layers
        sums = torch.zeros(layers + 2, dtype=torch.float64, device=self._accelerator.device)
        for number, part in enumerate(micro):
            last = number == len(micro) - 1
            self._reseed(step, number)
            batch = self._feed.batch([rows[i] for i in part or [0]], [targets[i] for i in part or [0]], bool(part))
            with nullcontext() if last else self._accelerator.no_sync(self._wrapped):
                total, told = self._wrapped(batch, step)
                # gradients are averaged over processes, so each one's sum counts world-fold
                self._accelerator.backward(total * (self._share.world / tokens))
            sums[0] += total.detach().double()
            sums[1:] += told
        norm = self._gradient_norm()
        loss, signum, (*per_layer, spread) = self._agree(sums, received)
        applied = bool(torch.isfinite(torch.tensor([loss, norm])).all())
        bad = () if applied else self._bad_rows(rows, targets, micro, float(sums[0]), step)
        if applied:
            self._optimizer.step()
        self._optimizer.zero_grad()
        means = {i: value / tokens for i, value in enumerate(per_layer, start=1) if value == value}
        told_spread = spread / tokens if spread == spread else None
        return StepResult(loss / tokens, means, told_spread, tokens, norm, bad, applied, signum)

    def _reseed(self, step: int, micro: int) -> None:
        """Dropout is a function of (seed, step, micro-batch, process): nothing to save, nothing to lose."""
        torch.manual_seed(hash((self._seed, step, micro, self._share.rank)) % 2**63)

    def _gradient_norm(self) -> float:
        norm = self._accelerator.clip_grad_norm_(self._trained, self._config.clip_norm)
        full: Any = getattr(norm, "full_tensor", None)
        return float(full() if full is not None else norm)

    def _agree(self, sums: Tensor, received: int) -> tuple[float, int, list[float]]:
        """Sums over processes, and the largest signal. NaN stays NaN in a sum."""
        packed = torch.cat([sums, sums.new_tensor([float(received)])])
        if self._share.world > 1:
            parts = self._accelerator.gather(packed[None])
            packed = torch.cat([parts[:, :-1].sum(0), parts[:, -1].amax(0, keepdim=True)])
        values = packed.tolist()
        return values[0], int(values[-1]), values[1:-1]

    def _bad_rows(
        self, rows: Sequence[int], targets: list[list[int]], micro: list[list[int]], own: float, step: int
    ) -> tuple[str, ...]:
        """Which rows have a loss that is not finite, each tried alone; all rows when none has."""
        from accelerate.utils import gather_object

        found: list[int] = []
        sharded = any(hasattr(parameter, "placements") for parameter in self._trained)
        if own - own != 0:  # NaN or infinite here
            mine = [i for part in micro for i in part]
            found = mine if sharded else [i for i in mine if not self._finite_alone(rows[i], targets[i], step)]
        if self._share.world > 1:
            found = list(gather_object(found))
        return tuple(self._feed.ids([rows[i] for i in sorted(found)] or rows))

    def _finite_alone(self, row: int, target: list[int], step: int) -> bool:
        with torch.no_grad(), self._accelerator.autocast():
            total, _ = self._loss(self._feed.batch([row], [target]), step)
        return bool(torch.isfinite(total))
