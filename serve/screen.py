"""An int8 copy of the head: every word's logit at a quarter of the bytes, and how far off it can be.

Words and activations are quantised symmetrically with one scale a row: never one for the whole tensor, where an outlier
row would coarsen its mates (design.md section 4). The integer products are exact, whatever the batch.

With q the integers and s the scale of a row, and by Cauchy-Schwarz over the two residues,
|x . w - (s_x q_x) . (s_w q_w)| <= ||x|| ||w - s_w q_w|| + ||x - s_x q_x|| ||s_w q_w||.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEVELS = 127
BLOCK = 16  # int8 products want whole blocks of inputs
MIN_ROWS_CUDA = 32  # and on CUDA more than 16 rows
FP32 = 2.0**-24  # unit roundoff
EXACT_INPUTS = 1024  # products of int8 whose sum fp32 holds exactly: 127 * 127 * 1024 < 2^24


@dataclass(frozen=True)
class Rows:
    """Quantised rows of a matrix.

    Attributes:
        ints: int8, padded with zeros to whole blocks.
        scale: fp32; NaN for a row that is not finite.
        kept, lost: Euclidean norms of what the integers stand for and of what they miss.
    """

    ints: Int[Tensor, "rows inputs"]
    scale: Float[Tensor, " rows"]
    kept: Float[Tensor, " rows"]
    lost: Float[Tensor, " rows"]


def quantised(matrix: Float[Tensor, "rows width"]) -> Rows:
    """Rows of whole numbers -127..127 times a scale of their own."""
    values = matrix.float()
    largest = values.abs().amax(dim=-1)
    scale = torch.where(largest == 0.0, 1.0, largest / LEVELS)
    ints = (values / scale[:, None]).round().clamp(-LEVELS, LEVELS).nan_to_num(0.0)
    meant = ints * scale[:, None]
    padded = F.pad(ints.to(torch.int8), (0, -ints.shape[1] % BLOCK))
    return Rows(padded, scale, meant.norm(dim=-1), (values - meant).norm(dim=-1))


def int_product(rows: Int[Tensor, "rows inputs"], words: Int[Tensor, "words inputs"]) -> Int[Tensor, "rows words"]:
    """Exact int32 products of int8 matrices."""
    count = rows.shape[0]
    if rows.is_cuda and count < MIN_ROWS_CUDA:
        rows = F.pad(rows, (0, 0, 0, MIN_ROWS_CUDA - count))
    return torch._int_mm(rows, words.t())[:count]


def slow_int_product(rows: Int[Tensor, "rows inputs"], words: Int[Tensor, "words inputs"]) -> Int[Tensor, "rows words"]:
    """The same by fp32 products of so few inputs at a time that no sum is rounded."""
    parts = [slice(start, start + EXACT_INPUTS) for start in range(0, rows.shape[1], EXACT_INPUTS)]
    return torch.stack([(rows[:, part].float() @ words[:, part].float().t()).int() for part in parts]).sum(
        dim=0, dtype=torch.int32
    )


def int_product_is_exact(inputs: int, device: torch.device) -> bool:
    """Whether this machine adds int8 products without saturation: CPUs without dot-product instructions may not."""
    signs = torch.ones((2, inputs), dtype=torch.int8, device=device)
    signs[1, 1::2] = -1
    rows, words = signs.repeat(8, 1) * LEVELS, signs.repeat(BLOCK, 1) * LEVELS
    return bool((int_product(rows, words) == slow_int_product(rows, words)).all())


def sum_error(inputs: int) -> float:
    """Rounding of a sum of so many products in fp32, in whatever order, with that of the bound's own few operations."""
    return (inputs + 32) * FP32


def doubts(head: Float[Tensor, "vocab d_model"], words: Rows) -> Float[Tensor, "2 vocab"]:
    """How far each word's int8 logit can be off: times ||x||, and times ||x - s_x q_x||.

    ``words``: the head, quantised.
    """
    error = sum_error(head.shape[1])
    certain = 1.0 + 2 * error
    per_norm = certain * words.lost + error * (head.float().norm(dim=-1) + words.kept)
    return torch.stack([per_norm, certain * words.kept])


class Screen:
    """Int8 words of a head (V, d_model) in the served dtype.

    Args:
        head: the exact words.
    """

    def __init__(self, head: Float[Tensor, "vocab d_model"]) -> None:
        self.head, self.vocab = head, head.shape[0]
        words = quantised(head)
        self.doubt = doubts(head, words)
        self._ints = F.pad(words.ints, (0, 0, 0, -self.vocab % BLOCK))
        self._scale = words.scale
        self._norm = head.float().norm(dim=-1)
        self._product = int_product if int_product_is_exact(self._ints.shape[1], head.device) else slow_int_product
        self._sum_error = sum_error(head.shape[1])

    def approximate(self, rows: Rows) -> Float[Tensor, "rows vocab"]:
        """Int8 logits; NaN for a row that is not finite."""
        products = self._product(rows.ints, self._ints)[:, : self.vocab]
        return products.float() * rows.scale[:, None] * self._scale

    def exact(
        self, normed: Float[Tensor, "rows d_model"], ids: Int[Tensor, "rows chosen"]
    ) -> Float[Tensor, "rows chosen"]:
        """Logits of chosen words, in fp32 of the served numbers: not yet rounded to the served dtype."""
        return torch.bmm(self.head[ids].float(), normed.float()[:, :, None])[..., 0]

    def highest(
        self, normed: Float[Tensor, "rows d_model"], rows: Rows, approximate: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """What the full head's logits cannot exceed, before they are rounded to the served dtype."""
        norms = torch.stack([normed.float().norm(dim=-1), rows.lost], dim=1) * (1.0 + 2 * self._sum_error)
        return torch.addmm(approximate, norms, self.doubt)

    def winner(
        self,
        normed: Float[Tensor, "rows d_model"],
        ids: Int[Tensor, "rows chosen"],
        exact: Float[Tensor, "rows chosen"],
        rest: Float[Tensor, " rows"],
    ) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """The word that leads, and whether it is surely the full head's argmax; never so for a row with a NaN.

        The full head adds its products in another order, so a logit is known up to its rounding: ``low`` to ``high``
        in the served dtype. Of equal logits the smallest id is the argmax.

        Args:
            exact: of ``exact``.
            rest: what the words that are not among ``ids`` cannot exceed.
        """
        norm = normed.float().norm(dim=-1, keepdim=True)
        doubt = 2 * self._sum_error * norm * self._norm[ids]  # (rows, chosen): two sums of the same products
        low, high = (bound.to(self.head.dtype) for bound in (exact - doubt, exact + doubt))
        top = low.amax(dim=-1, keepdim=True)
        word = torch.where(low == top, ids, self.vocab).amin(dim=-1, keepdim=True)
        beaten = (high < top) | ((high == top) & (ids > word)) | ((ids == word) & exact.isfinite())
        return word[:, 0], beaten.all(dim=-1) & (rest.to(self.head.dtype) < top[:, 0])
