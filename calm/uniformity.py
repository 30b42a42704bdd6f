"""Batch-aware training: rows that decode together should cross together.

Under ``sync`` a batch runs as deep as its slowest row. The discussion of arXiv 2407.20272 proposes to punish, while
training, the variance of the crossing layer over the rows of a batch. Crossing is a step function, so here a layer
crosses with probability sigmoid((confidence - threshold) / temperature), and what varies is the expected layer.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import Measure, UniformityConfig

CHUNK = 2**22  # logits that are held at once


def exit_spread(
    hiddens: Sequence[Float[Tensor, "batch target d_model"]],
    live: Bool[Tensor, "batch target"],
    exits: Sequence[int],
    logits: Callable[[Tensor], Tensor],
    config: UniformityConfig,
) -> Float[Tensor, ""]:
    """Squared distance of each token's expected crossing layer from the mean of its column, summed over the tokens.

    A column holds the tokens at one position of their answers, which decode in one step; with a single row it counts
    nothing. Rows are those of one micro-batch: more processes or accumulation make columns smaller. Layers are shares
    of the depth, so that a weight means the same for every depth.

    Args:
        hiddens: raw residual after layers 1..L.
        live: positions that are targets.
        exits: layers after which a row may leave.
        logits: of hidden states.
    """
    kept = live.flatten().nonzero().squeeze(-1)
    rows = [hidden.flatten(0, 1).index_select(0, kept) for hidden in hiddens]
    depth = expected_depth(rows, exits, logits, config) / len(hiddens)
    column = (torch.arange(live.shape[1], device=live.device).expand_as(live)).flatten().index_select(0, kept)
    sums = torch.zeros(live.shape[1], dtype=depth.dtype, device=depth.device).index_add(0, column, depth)
    counts = live.sum(dim=0).clamp(min=1)
    return (depth - (sums / counts).index_select(0, column)).square().sum()


def expected_depth(
    rows: Sequence[Float[Tensor, "tokens d_model"]],
    exits: Sequence[int],
    logits: Callable[[Tensor], Tensor],
    config: UniformityConfig,
) -> Float[Tensor, " tokens"]:
    """Expected crossing layer of each token, 1..L: the sum over l = 0..L-1 of P(not crossed by layer l)."""
    waiting = torch.ones(len(rows[0]), device=rows[0].device)
    depth = torch.ones_like(waiting)
    for layer in range(1, len(rows)):
        if layer in exits and (layer > 1 or config.measure is not Measure.state):
            sure = confidence(rows[layer - 1], rows[layer - 2] if layer > 1 else None, logits, config.measure)
            waiting = waiting * torch.sigmoid((config.threshold - sure) / config.temperature)
        depth = depth + waiting
    return depth


def confidence(
    hidden: Float[Tensor, "tokens d_model"],
    before: Float[Tensor, "tokens d_model"] | None,
    logits: Callable[[Tensor], Tensor],
    measure: Measure,
) -> Float[Tensor, " tokens"]:
    """``state`` or ``softmax`` as calm.confidence has them, to be differentiated; softmax keeps no logits."""
    if measure is Measure.state:
        assert before is not None
        return F.cosine_similarity(hidden.float(), before.float(), dim=-1).clamp(0.0, 1.0)

    def margin(part: Tensor) -> Tensor:
        top = torch.log_softmax(logits(part).float(), dim=-1).topk(2, dim=-1).values.exp()
        return top[:, 0] - top[:, 1]

    width = logits(hidden[:1]).shape[-1]
    parts = torch.split(hidden, max(1, CHUNK // width))
    return torch.cat([checkpoint(margin, part, use_reentrant=False) for part in parts])
