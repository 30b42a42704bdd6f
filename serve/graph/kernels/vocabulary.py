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
    stats,  # (STATS, B, tiles) fp32
    order,
    active,
    size,  # B
    tiles,
    vocab,
    k,
    eps,
    head_scale,
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
    target, next_stat = stats + rows * tiles + tl.program_id(1), size * tiles
    tl.store(target, best, mask=there)
    tl.store(target + next_stat, (tl.program_id(1) * BLOCK_N + place).to(tl.float32), mask=there)
    tl.store(target + 2 * next_stat, second, mask=there)
    tl.store(target + 3 * next_stat, tl.where(broken, float("nan"), tl.sum(share, axis=1)), mask=there)
    further = share * tl.where(share > 0.0, logits - best[:, None], 0.0)
    tl.store(target + 4 * next_stat, tl.sum(further, axis=1), mask=there)


@triton.jit
def choose_kernel(
    stats,  # as words_kernel leaves them
    order,
    active,
    chosen,  # (B,) the best word of each row; -1 where it has no number
    sums,  # (B, 4) fp32: best, second, sum of exponentials over exp(best), mean distance from the best logit
    size,
    tiles,
    BLOCK: tl.constexpr,  # the power of two that holds ``tiles``
):
    """Of all tiles, one program a row."""
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    there = tile < tiles
    at, next_stat = stats + row * tiles + tile, size * tiles
    best = tl.load(at, mask=there, other=float("-inf"))  # all of them are on their way before one is looked at
    words = tl.load(at + next_stat, mask=there, other=0.0)
    second = tl.load(at + 2 * next_stat, mask=there, other=float("-inf"))
    shares = tl.load(at + 3 * next_stat, mask=there, other=0.0)
    distances = tl.load(at + 4 * next_stat, mask=there, other=0.0)
    top = tl.max(best, axis=0)
    winner = tile == tl.argmax(best, axis=0)
    word = tl.sum(tl.where(winner, words, 0.0), axis=0)
    others = tl.max(tl.where(winner, float("-inf"), best), axis=0)
    beside = tl.max(tl.where(winner, second, float("-inf")), axis=0)
    shrink = tl.where(there, tl.exp(best - top), 0.0)
    further = tl.where(shrink > 0.0, best - top, 0.0) * shares + distances
    total = tl.sum(shrink * shares, axis=0)
    weighted = tl.sum(shrink * further, axis=0)
    sound = (total == total) & (tl.abs(top) < float("inf"))
    tl.store(chosen + row, tl.where(sound, word.to(tl.int64), -1))
    tl.store(sums + row * 4, tl.where(sound, top, float("nan")))
    tl.store(sums + row * 4 + 1, tl.maximum(others, beside))
    tl.store(sums + row * 4 + 2, total)
    tl.store(sums + row * 4 + 3, weighted / total)
