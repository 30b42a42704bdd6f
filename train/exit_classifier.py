"""Stage 2: fit the exit classifier on the frozen backbone (CALM section 3.4).

Only one linear layer is trained, so the backbone runs once over a sample of the training rows, in eval mode and
without gradients; its layers' hidden states and the labels (does the layer say what the full model says?) are kept, a
pool of rows at a time, and the linear layer is trained on them. With several processes each reads its share and
gradients are summed.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from calm.config import ClassifierConfig, ClassifierLoss, Precision
from calm.data.collate import length_batches, pad
from calm.errors import TrainingError
from calm.losses import agreement_labels, geometric_loss, independent_loss
from calm.models.speaking import SpeakingModel
from calm.progress import Progress
from calm.tracking import Tracker

from .classifier_report import ClassifierReport, flat_metrics, layer_reports
from .context import resolve_precision

log = logging.getLogger(__name__)

Row = tuple[Sequence[int], Sequence[int]]  # ids of source and target, EOS included
POOL_BYTES = 2**28  # hidden states held at once, per process
TRAIN_TOKENS = 50_000  # target tokens read in all; the classifier has d + 1 parameters ...
TOKENS_PER_PARAMETER = 100  # ... so a wide model gets more
OBJECTIVES = {ClassifierLoss.independent: independent_loss, ClassifierLoss.geometric: geometric_loss}


@dataclass
class Features:
    """Tokens of some rows: ``hidden`` (tokens, layers, D) fp32, the raw residual; ``agrees`` (tokens, layers) bool.

    Layers are L - 1, or with ``classifier.exits_only`` those that may be left.
    """

    hidden: Tensor
    agrees: Tensor

    def __len__(self) -> int:
        return len(self.hidden)


@dataclass
class Scale:
    """Mean and spread of each dimension, over all tokens and layers, (D,): makes AdamW's steps fit every dimension."""

    mean: Tensor
    spread: Tensor

    def apply_(self, features: Features) -> Features:
        features.hidden.sub_(self.mean).div_(self.spread)
        return features

    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weights for raw hidden states that score as (``weight``, ``bias``) do for scaled ones; exact, in fp64."""
        folded = weight.double() / self.spread.double()
        return folded, bias.double() - (folded * self.mean.double()).sum(-1)


def processes() -> tuple[int, int]:
    """Rank and number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_processes(values: Tensor) -> Tensor:
    """In place; all processes get the same bits."""
    if processes()[1] > 1:
        dist.all_reduce(values)
    return values


@contextmanager
def frozen(model: SpeakingModel) -> Iterator[None]:
    """Eval mode without gradients; the mode before is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def sample(rows: Sequence[Row], tokens: int, most_rows: int, seed: int) -> list[Row]:
    """Rows in an order drawn by seed, until their targets hold ``tokens`` tokens; the same in all processes.

    Their number is a multiple of the number of processes, so that all run the backbone equally often.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen: list[Row] = []
    held = 0
    for index in order[:most_rows]:
        if held >= tokens:
            break
        row = rows[index]  # once: rows may be encoded on the way
        chosen.append(row)
        held += len(row[1])
    return chosen[: len(chosen) // processes()[1] * processes()[1]]


def layers_read(model: SpeakingModel, config: ClassifierConfig) -> list[int]:
    """Layers that the classifier learns from."""
    return model.settings.exit_layers if config.exits_only else list(range(1, model.num_layers))


def read(
    model: SpeakingModel,
    rows: Sequence[Row],
    batch_size: int,
    device: torch.device,
    bar: Progress,
    config: ClassifierConfig,
) -> Features:
    """Run the frozen backbone over ``rows`` under teacher forcing at full depth.

    In bf16 its layers alone are: logits in bf16 tie, and a tie says nothing about agreement.
    """
    tokens, layers = sum(len(target) for _, target in rows), layers_read(model, config)
    features = Features(
        torch.empty((tokens, len(layers), model.d_model), device=device),
        torch.empty((tokens, len(layers)), dtype=torch.bool, device=device),
    )
    low = resolve_precision(config.precision, device) is Precision.bf16
    at = 0
    with frozen(model):
        for batch in length_batches([len(source) for source, _ in rows], batch_size, seed=0, epoch=0):
            sources, source_mask = (part.to(device) for part in pad([rows[i][0] for i in batch]))
            targets, kept = (part.to(device) for part in pad([rows[i][1] for i in batch], multiple=4))
            inputs = torch.cat([torch.full_like(targets[:, :1], model.start_token_id), targets[:, :-1]], dim=1)
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                hiddens = model.answer_hiddens(sources, source_mask, inputs)
            asked = [hiddens[layer - 1][kept] for layer in (*layers, model.num_layers)]
            every = torch.stack(asked, dim=1).to(model.dtype)  # (tokens, layers and the last one, D)
            end = at + len(every)
            features.hidden[at:end] = every[:, :-1].float()
            features.agrees[at:end] = agreement_labels(model, every)
            at = end
            bar.update(len(batch))
    return features


def measure_scale(features: Features) -> Scale:
    """Over the tokens of all processes; a dimension that never changes keeps its unit."""
    flat = features.hidden.flatten(0, 1)
    count = torch.full((1,), float(len(flat)), dtype=torch.float64, device=flat.device)
    sums = torch.stack([flat.sum(0, dtype=torch.float64), flat.square().sum(0, dtype=torch.float64)])
    packed = sum_over_processes(torch.cat([sums.flatten(), count]))
    mean, square = (packed[:-1] / packed[-1]).view(2, -1)
    spread = (square - mean.square()).clamp_min(0).sqrt()
    floor = 1e-6 * square.sqrt()
    return Scale(mean.float(), torch.where(spread > floor, spread, torch.ones_like(spread)).float())


def pool_sizes(rows: Sequence[Row], token_bytes: int) -> list[list[Row]]:
    """Cut ``rows`` into pools whose hidden states fit into POOL_BYTES in every process."""
    tokens = sum(len(target) for _, target in rows)
    world = processes()[1]
    pools = max(1, -(-tokens * token_bytes // (POOL_BYTES * world)))
    length = -(-len(rows) // (pools * world)) * world
    return [list(rows[start : start + length]) for start in range(0, len(rows), length)]


class Fit:
    """AdamW on one linear layer over scaled hidden states; the best state by validation loss is kept."""

    def __init__(self, config: ClassifierConfig, dev: Features, width: int, seed: int) -> None:
        self.config, self.dev, self.objective = config, dev, OBJECTIVES[config.loss]
        device = dev.hidden.device
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.optimizer = torch.optim.AdamW(self.linear.parameters(), lr=config.lr, weight_decay=0.0)
        self.draw = torch.Generator().manual_seed(seed * 1_000_003 + processes()[0])
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.best_step, self.best_loss = 0, float("inf")
        self.best: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.check(float("nan"))

    def scores(self, features: Features) -> Tensor:
        return torch.cat([self.linear(part).squeeze(-1) for part in torch.split(features.hidden, 4096)])

    def check(self, train_loss: float) -> None:
        """Validation loss, weighted by tokens over all processes; remembers the best."""
        with torch.no_grad():
            loss = self.objective(self.scores(self.dev), self.dev.agrees)
        packed = sum_over_processes(torch.stack([loss * len(self.dev), loss.new_tensor(float(len(self.dev)))]))
        value = float(packed[0] / packed[1])
        if not math.isfinite(value):
            raise TrainingError(
                f"the exit classifier's validation loss is {value} at step {self.step}: hidden states or classifier.lr="
                f"{self.config.lr} are too large; check the checkpoint or lower classifier.lr"
            )
        self.history.append({"step": self.step, "train_loss": train_loss, "validation_loss": value})
        if value < self.best_loss:
            self.best_step, self.best_loss = self.step, value
            self.best = (self.linear.weight.detach().clone(), self.linear.bias.detach().clone())

    def advance(self, pool: Features, tokens: int) -> None:
        """One step on ``tokens`` tokens drawn from the pool (per process)."""
        config, self.step = self.config, self.step + 1
        warm = min(1.0, self.step / max(1, config.warmup_steps))
        decay = 1 - (self.step - 1) / config.steps
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * min(warm, decay)
        index = torch.randint(len(pool), (tokens,), generator=self.draw).to(pool.hidden.device)
        logits = self.linear(pool.hidden[index]).squeeze(-1)
        loss = self.objective(logits, pool.agrees[index])
        parameters = list(self.linear.parameters())
        grads = [grad.flatten() for grad in torch.autograd.grad(loss, parameters)]
        packed = sum_over_processes(torch.cat([*grads, loss.detach()[None]])) / processes()[1]
        at = 0
        for parameter in parameters:
            parameter.grad = packed[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.optimizer.step()
        if self.step % config.log_every == 0 or self.step == config.steps:
            self.check(float(packed[-1]))


def gather(fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of the validation tokens of all processes."""
    with torch.no_grad():
        mine = (fit.scores(fit.dev).double().cpu().numpy(), fit.dev.agrees.cpu().numpy())
    world = processes()[1]
    if world == 1:
        return mine
    parts: list[tuple[np.ndarray, np.ndarray]] = [mine] * world
    dist.all_gather_object(parts, mine)
    return np.concatenate([scores for scores, _ in parts]), np.concatenate([agrees for _, agrees in parts])


def install(model: SpeakingModel, fit: Fit, scale: Scale) -> None:
    """Write the best state into the model, folded so that it reads the raw residual."""
    weight, bias = scale.fold(*fit.best)
    with torch.no_grad():
        model.classifier.linear.weight.copy_(weight)
        model.classifier.linear.bias.copy_(bias)


def fit_classifier(
    model: SpeakingModel,
    train_rows: Sequence[Row],
    dev_rows: Sequence[Row],
    config: ClassifierConfig,
    *,
    tracker: Tracker | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    first_step: int = 0,
    report_path: Path | None = None,
) -> ClassifierReport:
    """Train ``model.classifier``; nothing else of the model changes.

    All processes call it with the same arguments and end with the same weights; the first one shows progress and
    writes ``report_path``. ``tracker`` gets ``classifier/...`` metrics at ``first_step`` + step.

    Raises:
        TrainingError: a model of one decoder layer, fewer rows than processes, a loss that is not finite.
    """
    if model.num_layers < 2:
        raise TrainingError("the exit classifier needs at least 2 decoder layers: a model of one never exits early")
    rank, world = processes()
    device = device or model.device
    token_bytes = len(layers_read(model, config)) * model.d_model * 4
    wanted = config.tokens or max(TRAIN_TOKENS, TOKENS_PER_PARAMETER * model.d_model)
    train = sample(train_rows, wanted, config.steps * config.batch_size, seed)
    dev = sample(dev_rows, POOL_BYTES * world // token_bytes, config.eval_rows, seed)
    if not dev or (config.steps and not train):
        raise TrainingError(
            f"the exit classifier needs at least {world} train and {world} dev rows (one a process), "
            f"got {len(train_rows)} and {len(dev_rows)}"
        )
    pools = pool_sizes(train, token_bytes) if config.steps else []
    train_tokens = sum(len(target) for _, target in train)
    with Progress(len(train[rank::world]) + len(dev[rank::world]), "exit classifier", shown=rank == 0) as bar:
        features = read(model, dev[rank::world], config.batch_size, device, bar, config)
        scale = measure_scale(features)
        fit = Fit(config, scale.apply_(features), model.d_model, seed)
        batch_tokens = max(1, config.batch_size * train_tokens // max(1, len(train) * world))
        for number, pool_rows in enumerate(pools, start=1):
            mine = pool_rows[rank::world]
            pool = scale.apply_(read(model, mine, config.batch_size, device, bar, config))
            while fit.step < config.steps * number // len(pools):
                fit.advance(pool, min(batch_tokens, len(pool)))
            del pool  # before the next one is read
    report = _report(model, fit, scale, config, train_tokens)
    if rank == 0:
        _record(report, tracker, first_step, report_path)
    return report


def _report(
    model: SpeakingModel, fit: Fit, scale: Scale, config: ClassifierConfig, train_tokens: int
) -> ClassifierReport:
    with torch.no_grad():
        fit.linear.weight.copy_(fit.best[0])
        fit.linear.bias.copy_(fit.best[1])
    scores, agrees = gather(fit)
    install(model, fit, scale)
    model.settings.has_classifier = model.settings.has_classifier or config.steps > 0
    return ClassifierReport(
        objective=config.loss.value,
        steps=config.steps,
        best_step=fit.best_step,
        untrained_loss=fit.history[0]["validation_loss"],
        validation_loss=fit.best_loss,
        train_tokens=train_tokens,
        validation_tokens=len(scores),
        layers=layer_reports(scores, agrees, layers_read(model, config)),
        history=fit.history[1:],
    )


def _record(report: ClassifierReport, tracker: Tracker | None, first_step: int, path: Path | None) -> None:
    if tracker is not None:
        for point in report.history:
            losses = {f"classifier/{name}": point[name] for name in ("train_loss", "validation_loss")}
            tracker.log(losses, first_step + int(point["step"]))
        tracker.log(flat_metrics(report.layers), first_step + report.steps)
    if path is not None:
        report.save(path)
    log.info("exit classifier: validation loss %.4f at step %d", report.validation_loss, report.best_step)
