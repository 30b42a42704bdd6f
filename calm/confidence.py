"""Confidence measures: one function per measure over a LayerView, and one dict from name to callable.

A confidence is fp32 in [0, 1], one per row (CALM section 3.5 for softmax, state and classifier). NaN means that
the measure has nothing to say at this layer and never crosses. ``state`` and ``classifier`` never touch the head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Union

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .config import Measure


@dataclass(eq=False)
class Seen:
    """What ``agreement`` needs of a checked layer: each row's argmax, and for how many checks it has been that."""

    argmax: Tensor
    run: Tensor


@dataclass(eq=False)
class LayerView:
    """What a measure may look at after one layer.

    Attributes:
        layer: 1..L.
        hidden: residual stream after this layer, (rows, d_model).
        previous: residual stream after the layer before (not the checked layer before); None at layer 1.
        head: hidden -> logits over the vocabulary; called only when a measure reads ``logits``.
        classifier: hidden -> P(exit).
        before: the checked layer before for the same rows, None at the first; read by ``agreement``.
        agreement_k: run length at which ``agreement`` is certain.
    """

    layer: int
    hidden: Tensor
    previous: Tensor | None
    head: Callable[[Tensor], Tensor]
    classifier: Callable[[Tensor], Tensor]
    before: Union["LayerView", Seen, None] = None
    agreement_k: int = 3

    @cached_property
    def logits(self) -> Float[Tensor, "rows vocab"]:
        return self.head(self.hidden).float()

    @cached_property
    def argmax(self) -> Int[Tensor, " rows"]:
        return self.logits.argmax(dim=-1)

    @cached_property
    def run(self) -> Int[Tensor, " rows"]:
        """Number of checked layers, ending here, whose argmax is the same."""
        if self.before is None:
            return torch.ones_like(self.argmax)
        return torch.where(self.argmax == self.before.argmax, self.before.run + 1, torch.ones_like(self.argmax))


def softmax_margin(view: LayerView) -> Float[Tensor, " rows"]:
    """Difference between the two largest softmax probabilities."""
    top2 = view.logits.topk(2, dim=-1).values  # (rows, 2)
    total = view.logits.logsumexp(dim=-1, keepdim=True)
    probability = (top2 - total).exp()
    return (probability[:, 0] - probability[:, 1]).clamp(0.0, 1.0)


def max_prob(view: LayerView) -> Float[Tensor, " rows"]:
    """Largest softmax probability."""
    top = view.logits.max(dim=-1).values
    return (top - view.logits.logsumexp(dim=-1)).exp().clamp(0.0, 1.0)


def entropy(view: LayerView) -> Float[Tensor, " rows"]:
    """1 - H / ln V."""
    log_p = view.logits.log_softmax(dim=-1)
    spread = -(log_p.exp() * log_p).sum(dim=-1)
    return (1.0 - spread / math.log(view.logits.shape[-1])).clamp(0.0, 1.0)


def agreement(view: LayerView) -> Float[Tensor, " rows"]:
    """Run length of equal argmax over the checked layers, over k, clamped at 1."""
    return (view.run.float() / view.agreement_k).clamp(max=1.0)


def state_similarity(view: LayerView) -> Float[Tensor, " rows"]:
    """Cosine with the previous layer's residual stream, clamped at 0; nothing at layer 1."""
    if view.previous is None:
        return torch.full(view.hidden.shape[:1], float("nan"), device=view.hidden.device)
    return F.cosine_similarity(view.hidden.float(), view.previous.float(), dim=-1).clamp(0.0, 1.0)


def exit_probability(view: LayerView) -> Float[Tensor, " rows"]:
    """P(exit) of the trained classifier on the raw residual stream."""
    return view.classifier(view.hidden).float()


HEAD_MEASURES = (Measure.softmax, Measure.max_prob, Measure.entropy, Measure.agreement)  # those that read ``logits``

CONFIDENCE: dict[Measure, Callable[[LayerView], Tensor]] = {
    Measure.softmax: softmax_margin,
    Measure.state: state_similarity,
    Measure.classifier: exit_probability,
    Measure.max_prob: max_prob,
    Measure.entropy: entropy,
    Measure.agreement: agreement,
}
