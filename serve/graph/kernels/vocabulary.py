"""The head in one pass: the two best words and the sums that every confidence over the vocabulary is made of.

No logit is written. margin = p1 - p2, max_prob = p1 and 1 - H / ln V all follow from the best two logits, the sum of
exponentials and the sum of exponentials times distances from the best logit.
"""

import triton
import triton.language as tl

from .ahead import take_turn
from .products import _active, _product

STATS = 5  # best logit, its word, second logit, sums of exp(logit - best) and of exp(logit - best) * (logit - best)


@triton.jit(do_not_specialize=["size", "tiles"])
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
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Of each tile of words."""
    take_turn(AHEAD)
    if tl.program_id(0) * ROWS >= tl.load(active):
        return
    rows, there = _active(active, order, ROWS)
    words = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = words < vocab
    total = _product(x, rows, there, weight, words, known, k, eps, True, ROWS, BLOCK_N, BLOCK_K, STAGES)
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


@triton.jit(do_not_specialize=["size", "tiles"])
def choose_kernel(
    stats,  # as words_kernel leaves them
    order,
    active,
    chosen,  # (B,) the best word of each row; -1 where it has no number
    measures,  # (B,) from here on where CONFIDES
    run_lengths,
    words,  # (B,) of the check before, where AGREEMENT
    run,  # (B,) checks in a row that said it
    confidence,  # (B,)
    size,
    tiles,
    nats,  # logarithm of the vocabulary's size
    CONFIDES: tl.constexpr,  # rows get their confidences, NaN where their measure is none of these
    SOFTMAX: tl.constexpr,  # indices of measures; -1: nobody asks
    MAX_PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    AGREEMENT: tl.constexpr,
    FIRST: tl.constexpr,  # no check came before
    BLOCK: tl.constexpr,  # the power of two that holds ``tiles``
    AHEAD: tl.constexpr,
):
    """Of all tiles: the best word of a row and how sure it is, one program a row."""
    take_turn(AHEAD)
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    there = tile < tiles
    at, next_stat = stats + row * tiles + tile, size * tiles
    best = tl.load(at, mask=there, other=float("-inf"))  # all of them are on their way before one is looked at
    places = tl.load(at + next_stat, mask=there, other=0.0)
    second = tl.load(at + 2 * next_stat, mask=there, other=float("-inf"))
    shares = tl.load(at + 3 * next_stat, mask=there, other=0.0)
    distances = tl.load(at + 4 * next_stat, mask=there, other=0.0)
    top = tl.max(best, axis=0)
    winner = tile == tl.argmax(best, axis=0)
    shrink = tl.where(there, tl.exp(best - top), 0.0)
    total = tl.sum(shrink * shares, axis=0)  # of exp(logit - top)
    sound = (total == total) & (tl.abs(top) < float("inf"))
    word = tl.where(sound, tl.sum(tl.where(winner, places, 0.0), axis=0).to(tl.int64), -1)
    tl.store(chosen + row, word)
    if CONFIDES:
        asked = tl.load(measures + row)
        sure = tl.full((), float("nan"), dtype=tl.float32)
        first = tl.where(sound, 1.0 / total, float("nan"))
        if SOFTMAX >= 0:
            runner_up = tl.maximum(
                tl.max(tl.where(winner, float("-inf"), best), axis=0),
                tl.max(tl.where(winner, second, float("-inf")), axis=0),
            )
            sure = tl.where(asked == SOFTMAX, first * (1.0 - tl.exp(runner_up - top)), sure)
        if MAX_PROB >= 0:
            sure = tl.where(asked == MAX_PROB, first, sure)
        if ENTROPY >= 0:
            further = tl.where(shrink > 0.0, best - top, 0.0) * shares + distances
            below = tl.sum(shrink * further, axis=0) * first  # mean distance from the best logit
            sure = tl.where(asked == ENTROPY, 1.0 - (tl.log(total) - below) / nats, sure)
        if AGREEMENT >= 0:
            checks = tl.full((), 1, dtype=tl.int64)
            if not FIRST:
                checks += tl.where(tl.load(words + row) == word, tl.load(run + row), 0)
            tl.store(words + row, word)
            tl.store(run + row, checks)
            least = tl.maximum(tl.load(run_lengths + row), 1).to(tl.float32)
            sure = tl.where(asked == AGREEMENT, checks.to(tl.float32) / least, sure)
        tl.store(confidence + row, tl.where(sure == sure, tl.minimum(tl.maximum(sure, 0.0), 1.0), sure))
