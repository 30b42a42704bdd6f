"""The head in one pass: the two best words and the sums that every confidence over the vocabulary is made of.

No logit is written. margin = p1 - p2, max_prob = p1 and 1 - H / ln V all follow from the best two logits, the sum of
exponentials and the sum of exponentials times distances from the best logit.
"""

import triton
import triton.language as tl

from .products import _active, _mean_square, _product

STATS = 5  # best logit, its word, second logit, sums of exp(logit - best) and of exp(logit - best) * (logit - best)


@triton.jit
def words_kernel(
    x,  # (B, k)
    norm,
    weight,  # (vocab, k)
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
    scale = tl.rsqrt(_mean_square(x, rows, there, k, BLOCK_K, ROWS) + eps)
    total = _product(x, rows, there, norm, scale, head_scale, weight, words, known, k, True, ROWS, BLOCK_N, BLOCK_K)
    logits = total.to(weight.dtype.element_ty).to(tl.float32)  # rounded as they would be if they were stored
    broken = tl.max((logits != logits).to(tl.int32), axis=1) > 0  # its sums say so; maxima are taken of numbers
    logits = tl.where(known[None, :] & (logits == logits), logits, float("-inf"))
    best = tl.max(logits, axis=1)
    place = tl.argmax(logits, axis=1)
    mine = tl.arange(0, BLOCK_N)[None, :] == place[:, None]
    second = tl.max(tl.where(mine, float("-inf"), logits), axis=1)
    share = tl.where(known[None, :], tl.exp(logits - best[:, None]), 0.0)
    target, one = stats + rows * tiles + tl.program_id(1), size * tiles
    tl.store(target, best, mask=there)
    tl.store(target + one, (tl.program_id(1) * BLOCK_N + place).to(tl.float32), mask=there)
    tl.store(target + 2 * one, second, mask=there)
    tl.store(target + 3 * one, tl.where(broken, float("nan"), tl.sum(share, axis=1)), mask=there)
    further = tl.sum(share * tl.where(share > 0.0, logits - best[:, None], 0.0), axis=1)
    tl.store(target + 4 * one, further, mask=there)


@triton.jit
def choose_kernel(
    stats,  # (STATS, B, tiles)
    order,
    active,
    chosen,  # (B,) the best word of each row; -1 where it has no number
    measures,  # (B,), and from here on where CONFIDES
    run_lengths,
    words,  # (B,) of ``agreement``: the word of the check before
    run,  # (B,) and how many checks in a row said it
    confidence,  # (B,) of those who ask for one of these measures; NaN for the others
    widest,  # ln of the vocabulary
    size,
    tiles,
    CONFIDES: tl.constexpr,
    SOFTMAX: tl.constexpr,  # index of the measure; -1: nobody asks
    MAX_PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    AGREEMENT: tl.constexpr,
    FIRST: tl.constexpr,  # no layer was checked before this one
    BLOCK: tl.constexpr,  # the power of two that holds ``tiles``
):
    """Of all tiles, one program a row: its word, and how sure it is."""
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    there = tile < tiles
    at, one = stats + row * tiles + tile, size * tiles
    best = tl.load(at, mask=there, other=float("-inf"))
    named = tl.load(at + one, mask=there, other=0.0)
    seconds = tl.load(at + 2 * one, mask=there, other=float("-inf"))
    shares = tl.load(at + 3 * one, mask=there, other=0.0)
    distances = tl.load(at + 4 * one, mask=there, other=0.0)
    top = tl.max(best, axis=0)
    winner = tile == tl.argmax(best, axis=0)
    shrink = tl.where(there, tl.exp(best - top), 0.0)
    total = tl.sum(shrink * shares, axis=0)
    sound = (total == total) & (tl.abs(top) < float("inf"))
    word = tl.where(sound, tl.sum(tl.where(winner, named, 0.0), axis=0).to(tl.int64), -1)
    tl.store(chosen + row, word)
    if CONFIDES:
        asked = tl.load(measures + row)
        found = tl.full((), float("nan"), dtype=tl.float32)
        if SOFTMAX >= 0:
            others = tl.max(tl.where(winner, float("-inf"), best), axis=0)
            second = tl.maximum(others, tl.max(tl.where(winner, seconds, float("-inf")), axis=0))
            found = tl.where(asked == SOFTMAX, (1.0 - tl.exp(second - top)) / total, found)
        if MAX_PROB >= 0:
            found = tl.where(asked == MAX_PROB, 1.0 / total, found)
        if ENTROPY >= 0:
            further = tl.where(shrink > 0.0, best - top, 0.0) * shares + distances
            mean = tl.sum(shrink * further, axis=0) / total
            found = tl.where(asked == ENTROPY, 1.0 - (tl.log(total) - mean) / widest, found)
        if AGREEMENT >= 0:
            times = tl.full((), 1, dtype=tl.int64)
            if not FIRST:
                times = tl.where(tl.load(words + row) == word, tl.load(run + row) + 1, times)
            tl.store(words + row, word)
            tl.store(run + row, times)
            enough = tl.maximum(tl.load(run_lengths + row), 1)
            found = tl.where(asked == AGREEMENT, times.to(tl.float32) / enough.to(tl.float32), found)
        tl.store(confidence + row, tl.where(found == found, tl.minimum(tl.maximum(found, 0.0), 1.0), found))
