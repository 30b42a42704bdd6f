"""Cross-entropy of many exits through one head, without holding the logits.

The head's matrix product, the log-softmax over the vocabulary and the gradients with respect to hidden states and
head are all computed chunk by chunk in the forward pass; the backward only scales them. Peak memory is that of one
chunk, whatever the number of layers, tokens or vocabulary entries. It knows neither models nor settings.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS_CPU = 2**20  # logits of one chunk: 4 MiB in fp32, so that its passes stay near the caches
CHUNK_ELEMENTS_GPU = 2**26
CHUNK_MIN_ROWS = 128  # of one exit: fewer would spend the time on adding up the head's gradient


def rows_per_chunk(exits: int, vocab: int, device: torch.device) -> int:
    """How many rows, each with ``exits`` times ``vocab`` logits, make one chunk on that device."""
    budget = CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_GPU
    return max(1, max(budget // vocab, CHUNK_MIN_ROWS) // exits)


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that autocast would use for a product of ``tensor``; its own where autocast is off."""
    kind = tensor.device.type
    low = torch.is_autocast_enabled(kind) and tensor.dtype in (torch.float32, torch.bfloat16)
    return torch.get_autocast_dtype(kind) if low else tensor.dtype


def _losses(
    logits: Float[Tensor, "rows exits vocab"],
    labels: Int[Tensor, " rows"],
    smoothing: float,
    z_loss: float,
    distill: float,
) -> tuple[Float[Tensor, "rows exits"], Float[Tensor, "rows exits"], Float[Tensor, "rows exits vocab"]]:
    """Loss and plain NLL of every row and exit, and d loss / d logits (it overwrites nothing of the caller's)."""
    exits, vocab = logits.shape[1:]
    index = labels[:, None, None].expand(-1, exits, 1)
    log_prob = torch.log_softmax(logits, dim=-1)
    nll = -log_prob.gather(-1, index).squeeze(-1)
    loss = nll if smoothing == 0 else (1 - smoothing) * nll - smoothing * log_prob.mean(-1)
    # share of the label in each exit's target; the last exit is the teacher and follows the label alone
    share = torch.full((exits, 1), 1 - distill, dtype=logits.dtype, device=logits.device)
    share[-1] = 1
    teacher = None
    if distill and exits > 1:
        teacher_log = log_prob[:, -1]
        teacher = teacher_log.exp()
        entropy = (teacher * teacher_log).sum(-1, keepdim=True)
        divergence = entropy - torch.einsum("rv,rev->re", teacher, log_prob[:, :-1])
        loss = loss * share.squeeze(-1)
        loss[:, :-1] += distill * divergence
    lse = (logits[..., :1] - log_prob[..., :1]) if z_loss else None
    grad = log_prob.exp_()
    if lse is not None:
        loss = loss + z_loss * lse.squeeze(-1).square()
        grad *= 1 + 2 * z_loss * lse
    if smoothing:
        grad -= share * (smoothing / vocab)
    grad.scatter_add_(-1, index, (share * (smoothing - 1)).expand_as(index))
    if teacher is not None:
        grad[:, :-1].sub_(teacher[:, None, :], alpha=distill)
    return loss, nll, grad


class _HeadLoss(torch.autograd.Function):
    """sum over rows r and exits e of weights[e] * loss(rows[r, e] @ head.T, labels[r]); gradients found on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        options: tuple[float, float, float],
        chunk: int,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        exits, width = rows.shape[1:]
        wide = torch.promote_types(rows.dtype, torch.float32)
        row_grad = with_grad and rows.requires_grad
        head_grad = with_grad and head.requires_grad
        d_rows = torch.empty_like(rows) if row_grad else None
        d_head = torch.zeros(head.shape, dtype=wide, device=head.device) if head_grad else None
        total = torch.zeros((), dtype=wide, device=rows.device)
        nll = torch.zeros(exits, dtype=wide, device=rows.device)
        weights = weights.to(wide)
        with torch.autocast(rows.device.type, enabled=False):
            low_head = head.to(dtype)
            for start in range(0, rows.shape[0], chunk):
                part = slice(start, start + chunk)
                piece = rows[part]
                flat = piece.reshape(-1, width)
                logits = (flat.to(dtype) @ low_head.T).to(wide).view(-1, exits, head.shape[0])
                losses, part_nll, d_logits = _losses(logits, labels[part], *options)
                del logits
                total += (losses * weights).sum()
                nll += part_nll.sum(0)
                low_grad = d_logits.to(dtype).view(-1, head.shape[0])
                del d_logits
                if d_rows is not None:
                    d_rows[part] = (low_grad @ low_head).view_as(piece) * weights[:, None]
                if d_head is not None:
                    weighted = (piece * weights[:, None]).to(dtype).view(-1, width)
                    if dtype == wide:
                        d_head.addmm_(low_grad.T, weighted)
                    else:
                        d_head += low_grad.T @ weighted
        ctx.save_for_backward(d_rows, d_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_head = ctx.saved_tensors
        rows = None if d_rows is None else d_rows * grad_total.to(d_rows.dtype)
        head = None if d_head is None else (d_head * grad_total).to(ctx.head_dtype)
        return rows, head, None, None, None, None, None, None


def exit_cross_entropy(
    rows: Float[Tensor, "rows exits width"],
    head: Float[Tensor, "vocab width"],
    labels: Int[Tensor, " rows"],
    weights: Float[Tensor, " exits"],
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    distill: float = 0.0,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " exits"]]:
    """Weighted loss of all exits of all rows, summed, and the plain NLL of each exit, summed over rows (detached).

    The loss of a row at an exit is ``(1 - d) CE + d KL(last exit || exit) + z_loss lse^2`` where ``CE`` is
    cross-entropy against the label, smoothed as in ``F.cross_entropy``, ``lse`` the log of the softmax's
    denominator, and d = ``distill`` except at the last exit, where it is 0. The last exit's distribution is a
    constant for the others. Products run in autocast's dtype where that is on, everything after them in fp32
    (fp64 for fp64 input). ``rows`` are normed hidden states, ``chunk`` counts rows and defaults to what keeps a
    chunk's logits small on the device. It can be differentiated once.
    """
    if chunk is None:
        chunk = rows_per_chunk(rows.shape[1], head.shape[0], rows.device)
    options = (smoothing, z_loss, distill)
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _HeadLoss.apply)
    return apply(rows, head, labels, weights, options, chunk, matmul_dtype(rows), torch.is_grad_enabled())


def linear_cross_entropy(
    rows: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    labels: Int[Tensor, " rows"],
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    """``F.cross_entropy(rows @ weight.T, labels, reduction="sum")`` plus z_loss, in the memory of one chunk."""
    one = torch.ones(1, dtype=torch.float32, device=rows.device)
    total, _ = exit_cross_entropy(rows[:, None], weight, labels, one, smoothing=smoothing, z_loss=z_loss, chunk=chunk)
    return total


@torch.no_grad()
def head_argmax(
    rows: Float[Tensor, "rows exits width"], head: Float[Tensor, "vocab width"], chunk: int | None = None
) -> Int[Tensor, "rows exits"]:
    """Most likely token of every row at every exit, one chunk of logits at a time."""
    if chunk is None:
        chunk = rows_per_chunk(rows.shape[1], head.shape[0], rows.device)
    parts = [(piece @ head.T).argmax(-1) for piece in torch.split(rows, chunk)] if len(rows) else []
    return torch.cat(parts) if parts else torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
