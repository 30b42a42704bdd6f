"""What the two training stages minimise.

Stage 1, all layers speak: a weighted sum of the layers' cross-entropies (CALM eq. 6), every layer in every step or a
rotating few. Stage 2, the exit classifier: agreement with the full model, independent per layer or geometric-like
(CALM section 3.4). Labels of stage 2 are the full model's own argmax, never the reference.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .config import ExitLoss, FinetuneConfig
from .errors import ConfigError
from .finetune_config import Curriculum
from .head_loss import exit_cross_entropy, head_argmax
from .layerskip import exit_weights, exits_at

IGNORED = -100  # label of a position that is no target (padding)
GOLDEN = (math.sqrt(5) - 1) / 2


@runtime_checkable  # argument checks in tests ask isinstance
class SpeakingLayers(Protocol):
    """What the losses ask of a model: ``logits(hidden) == norm(hidden) @ head_weight.T`` for every layer."""

    @property
    def num_layers(self) -> int: ...

    @property
    def head_weight(self) -> Tensor: ...

    def norm(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LossParts:
    """Loss of one batch, as sums, so that token means can be taken over micro-batches and processes.

    Attributes:
        total: weighted loss summed over the kept tokens, 0-d, differentiable; divide by the step's token count.
        num_tokens: kept tokens, label not -100.
        per_layer: for each computed layer (1..L) its plain negative log-likelihood summed over tokens, detached.
    """

    total: Tensor
    num_tokens: int
    per_layer: dict[int, Tensor]

    def per_layer_means(self) -> dict[int, float]:
        """Nats per token of each computed layer; NaN without tokens. Waits for the device."""
        if not self.num_tokens:
            return dict.fromkeys(self.per_layer, float("nan"))
        sums = torch.stack(list(self.per_layer.values())).tolist()
        return {layer: value / self.num_tokens for layer, value in zip(self.per_layer, sums, strict=True)}


def layer_weights(loss: ExitLoss, num_layers: int, exit_scale: float = 0.2) -> list[float]:
    """Weight of each layer 1..L; they sum to 1.

    weighted: i / sum_j j (CALM eq. 6). uniform: 1 / L. last_plus_mean: mean_i L_i + L_L as in DEED (2311.08623),
    halved to keep the sum. layerskip: quadratic in the layer (2404.16710, eq. 7). final_only: the baseline without
    exits.
    """
    if loss is ExitLoss.weighted:
        raw = [float(layer) for layer in range(1, num_layers + 1)]
    elif loss is ExitLoss.uniform:
        raw = [1.0] * num_layers
    elif loss is ExitLoss.last_plus_mean:
        raw = [1.0] * (num_layers - 1) + [1.0 + num_layers]
    elif loss is ExitLoss.layerskip:
        raw = exit_weights(num_layers, exit_scale)
    else:
        raw = [0.0] * (num_layers - 1) + [1.0]
    return [value / sum(raw) for value in raw]


def draw_probabilities(weights: Sequence[int | float], count: int) -> list[float]:
    """Probability that each layer is among the ``count`` drawn: proportional to its weight, at most 1.

    Proportional drawing gives every layer that is not certain to be drawn the same weight once drawn, so the
    rotating loss changes little from step to step. Layers of weight 0 are never drawn.
    """
    certain: set[int] = set()
    while True:
        rest = sum(w for i, w in enumerate(weights) if i not in certain)
        share = (count - len(certain)) / rest if rest > 0 else 0.0
        over = {i for i, w in enumerate(weights) if i not in certain and w * share >= 1}
        if not over:
            return [1.0 if i in certain else w * share for i, w in enumerate(weights)]
        certain |= over


def weights_at(config: FinetuneConfig, num_layers: int, step: int, exits: Sequence[int]) -> list[float]:
    """Weight of each layer 1..L at this optimizer step; they sum to 1 and are 0 where the layer has no loss now.

    Where not every layer has one, the others share its weight (2404.16710, eq. 6).
    """
    weights = layer_weights(config.loss, num_layers, config.exit_scale)
    if config.exit_curriculum.kind is Curriculum.none and not config.exits_only:
        return weights
    layers = [*exits, num_layers] if config.exits_only else range(1, num_layers + 1)
    now = exits_at(config.exit_curriculum, list(layers), step, config.steps)
    kept = [weight if layer in now else 0.0 for layer, weight in enumerate(weights, start=1)]
    return [weight / sum(kept) for weight in kept]


def step_layers(
    config: FinetuneConfig, num_layers: int, step: int, seed: int, exits: Sequence[int] = ()
) -> dict[int, float]:
    """Layers (1..L, ascending) whose loss is computed at this optimizer step, and their weights.

    With ``rotate = m`` these are the last layer and m others, drawn systematically (one point, equal distances along
    the layers' summed probabilities), each with its weight divided by the probability of being drawn: the
    expectation over the point is exactly the chosen weighting. The point is uniform by seed and moves by the golden
    ratio from step to step, so that every stretch of steps visits the layers evenly. A function of (seed, step)
    alone: all processes and all micro-batches of a step compute the same layers.
    """
    weights = weights_at(config, num_layers, step, exits)
    if config.rotate == 0 or config.rotate >= sum(w > 0 for w in weights[:-1]):
        return {layer: w for layer, w in enumerate(weights, start=1) if w > 0}
    probabilities = draw_probabilities(weights[:-1], config.rotate)
    point = (random.Random(f"layers {seed}").random() + step * GOLDEN) % 1
    chosen: dict[int, float] = {}
    edge = 0.0
    for layer, probability in enumerate(probabilities, start=1):
        end = edge + probability if layer < num_layers - 1 else config.rotate  # the sum, without rounding
        # drawn when one of point, point + 1, ... lies in [edge, end)
        if math.ceil(edge - point) < math.ceil(end - point):
            chosen[layer] = weights[layer - 1] / probability
        edge = end
    return {**chosen, num_layers: weights[-1]}


def layer_losses(
    model: SpeakingLayers,
    hiddens: Sequence[Float[Tensor, "batch target d_model"]],
    labels: Int[Tensor, "batch target"],
    config: FinetuneConfig,
    step: int,
    seed: int,
    exits: Sequence[int] = (),
) -> LossParts:
    """Stage-1 loss of one batch from the raw residual stream after every decoder layer.

    ``exits`` are the layers that may be left, which ``finetune.exits_only`` asks for.

    Padding is dropped before norm and head; logits exist for one chunk of tokens at a time. With several processes
    call it inside the forward of the module that DDP or FSDP wraps, since it reads the head's weight.
    """
    if len(hiddens) != model.num_layers:
        raise ConfigError(f"expected the hidden states of all {model.num_layers} decoder layers, got {len(hiddens)}")
    layers = step_layers(config, model.num_layers, step, seed, exits)
    kept = (labels.reshape(-1) != IGNORED).nonzero().squeeze(-1)
    rows = torch.stack([hiddens[layer - 1].flatten(0, 1).index_select(0, kept) for layer in layers], dim=1)
    total, nll = exit_cross_entropy(
        model.norm(rows),
        model.head_weight,
        labels.reshape(-1).index_select(0, kept),
        torch.tensor(list(layers.values()), dtype=torch.float32, device=rows.device),
        smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        distill=config.distill,
    )
    return LossParts(total, len(kept), dict(zip(layers, nll.unbind(), strict=True)))


def agreement_labels(model: SpeakingLayers, rows: Float[Tensor, "rows layers d_model"]) -> Bool[Tensor, "rows earlier"]:
    """Stage-2 labels from the raw residual after layers 1..L: does layer i (1..L-1) say what layer L says?

    The caller puts the model into eval mode: dropout would make the full model disagree with itself.
    """
    with torch.no_grad():
        said = head_argmax(model.norm(rows), model.head_weight)
    return said[:, :-1] == said[:, -1:]


def independent_loss(logits: Float[Tensor, "rows earlier"], agrees: Bool[Tensor, "rows earlier"]) -> Float[Tensor, ""]:
    """Class-balanced binary cross-entropy of P(exit), mean over rows, then over layers 1..L-1 (CALM section 3.4).

    Per layer and batch, positives are weighted by 1 - (share of positives) and negatives by 1 - (share of
    negatives), so both classes weigh alike and a layer weighs more the more open its decision is. Rows are tokens;
    padding has been dropped.
    """
    target = agrees.to(logits.dtype)
    positive = target.mean(0)
    weight = torch.where(agrees, 1 - positive, positive)
    return (weight * F.binary_cross_entropy_with_logits(logits, target, reduction="none")).mean(0).mean()


def geometric_loss(logits: Float[Tensor, "rows earlier"], agrees: Bool[Tensor, "rows earlier"]) -> Float[Tensor, ""]:
    """Cross-entropy of the first agreeing layer under the chain of exit decisions, mean over rows.

    P(stop at i) = p_i prod_{j<i} (1 - p_j); the last layer stops for certain, so these sum to 1.
    """
    passed = F.pad(F.logsigmoid(-logits).cumsum(1), (1, 0))  # log P(not stopped before layer i), i = 1..L
    log_stop = passed + F.pad(F.logsigmoid(logits), (0, 1))
    first = F.pad(agrees.to(torch.uint8), (0, 1), value=1).argmax(1)
    return F.nll_loss(log_stop, first)
