"""The head in one pass: the two best words and the sums that every confidence over the vocabulary is made of.

No logit is written. margin = p1 - p2, max_prob = p1 and 1 - H / ln V all follow from the best two logits, the sum of
exponentials and the sum of exponentials times distances from the best logit.
"""

import triton
import triton.language as tl

from .products import _active, _product

STATS = 5  # best logit, its word, second logit, sums of exp(logit - best) and of exp(logit - best) * (logit - best)


@triton.jit
def words_kernel(
    x,  # (B, k)
    weight,  # (vocab, k) with the gain of the last norm
    stats,  # (tiles, B, STATS) fp32
    order,
    active,
    size,  # B
    vocab,
    k,
    eps,
    head_scale,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of each tile of words."""
    if tl.program_id(0) * ROWS >= tl.load(active):
        return
    rows, there = _active(active, order, ROWS)
    words = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = words < vocab
    total, _ = _product(x, rows, there, weight, weight, words, known, k, eps, True, False, ROWS, BLOCK_N, BLOCK_K)
    total *= head_scale
    logits = total.to(weight.dtype.element_ty).to(tl.float32)  # rounded as they would be if they were stored
    broken = tl.max((logits != logits).to(tl.int32), axis=1) > 0  # its sums say so; maxima are taken of numbers
    logits = tl.where(known[None, :] & (logits == logits), logits, float("-inf"))
    best = tl.max(logits, axis=1)
    place = tl.argmax(logits, axis=1)
    mine = tl.arange(0, BLOCK_N)[None, :] == place[:, None]
    second = tl.max(tl.where(mine, float("-inf"), logits), axis=1)
    share = tl.where(known[None, :], tl.exp(logits - best[:, None]), 0.0)
    target = stats + (tl.program_id(1) * size + rows) * STATS
    tl.store(target, best, mask=there)
    tl.store(target + 1, (tl.program_id(1) * BLOCK_N + place).to(tl.float32), mask=there)
    tl.store(target + 2, second, mask=there)
    tl.store(target + 3, tl.where(broken, float("nan"), tl.sum(share, axis=1)), mask=there)
    tl.store(target + 4, tl.sum(share * tl.where(share > 0.0, logits - best[:, None], 0.0), axis=1), mask=there)


@triton.jit
def choose_kernel(
    stats,
    order,
    active,
    chosen,  # (B,) the best word of each row; -1 where it has no number
    sums,  # (B, 4) fp32: best, second, sum of exponentials over exp(best), mean distance from the best logit
    size,
    tiles,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds ``tiles``
):
    """Of all tiles, one program a row."""
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    there = tile < tiles
    at = stats + (tile * size + row) * STATS
    best = tl.load(at, mask=there, other=float("-inf"))
    top = tl.max(best, axis=0)
    which = tl.argmax(best, axis=0)
    winner = tile == which
    word = tl.sum(tl.where(winner, tl.load(at + 1, mask=there, other=0.0), 0.0), axis=0)
    others = tl.max(tl.where(winner, float("-inf"), best), axis=0)
    beside = tl.max(tl.where(winner, tl.load(at + 2, mask=there, other=float("-inf")), float("-inf")), axis=0)
    shrink = tl.where(there, tl.exp(best - top), 0.0)
    shares = tl.load(at + 3, mask=there, other=0.0)
    further = tl.where(shrink > 0.0, best - top, 0.0) * shares + tl.load(at + 4, mask=there, other=0.0)
    total = tl.sum(shrink * shares, axis=0)
    weighted = tl.sum(shrink * further, axis=0)
    sound = (total == total) & (tl.abs(top) < float("inf"))
    tl.store(chosen + row, tl.where(sound, word.to(tl.int64), -1))
    tl.store(sums + row * 4, tl.where(sound, top, float("nan")))
    tl.store(sums + row * 4 + 1, tl.maximum(others, beside))
    tl.store(sums + row * 4 + 2, total)
    tl.store(sums + row * 4 + 3, weighted / total)
