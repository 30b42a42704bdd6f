"""Attention of one query a row over the keys of its slot, of whatever length, in one pass."""

import triton
import triton.language as tl

from .ahead import take_turn

LEAST: tl.constexpr = tl.constexpr(-1e30)  # below every score: -inf would make exp(top - highest) no number


@triton.jit
def attention_kernel(
    queries,  # (B, heads * width)
    keys,  # (slots, heads, positions, width) of the layer
    values,
    lengths,  # BIASED: (B,) position of each row, so one key more; else (slots,) tokens of each source
    bias,  # (heads, positions) by distance, fp32, where BIASED
    key_steps,  # (slots, heads, positions), fp32, where COARSE: keys and values are int8
    value_steps,  # (slots, heads, width)
    slots,
    order,
    active,
    out,  # (B, heads * width)
    heads,
    positions,
    scale,
    BIASED: tl.constexpr,
    COARSE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,  # the power of two that holds WIDTH
    BLOCK: tl.constexpr,  # keys at a time
    STAGES: tl.constexpr,  # blocks of keys and values that are on their way
    AHEAD: tl.constexpr,
):
    """One program a row and head: a row with a short source reads no more than that.

    Each place of a block has a maximum and sums of its own, which meet after the last block: nothing within the loop
    waits for other lanes, and blocks arrive while earlier ones are counted.
    """
    take_turn(AHEAD)
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    if BIASED:
        length = (tl.load(lengths + row) + 1).to(tl.int32)
    else:
        length = tl.load(lengths + slot)
    across, lane = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    inside = across < WIDTH
    query = tl.load(queries + (row * heads + head) * WIDTH + across, mask=inside, other=0.0).to(tl.float32) * scale
    base = (slot * heads + head) * positions
    top = tl.full((BLOCK,), LEAST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK, WIDE), dtype=tl.float32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        at = start + lane
        there = at < length
        place = base * WIDTH + at[:, None] * WIDTH + across[None, :]
        part = there[:, None] & inside[None, :]
        key = tl.load(keys + place, mask=part, other=0.0)
        value = tl.load(values + place, mask=part, other=0.0)
        score = tl.sum(key.to(tl.float32) * query[None, :], axis=1)
        if COARSE:
            score *= tl.load(key_steps + base + at, mask=there, other=0.0)
        if BIASED:
            score += tl.load(bias + head * positions + (length - 1 - at), mask=there, other=0.0)
        score = tl.where(there, score, float("-inf"))
        highest = tl.maximum(top, score)  # of numbers: a score that is none makes its share and the sums none
        share = tl.exp(score - highest)
        shrink = tl.exp(top - highest)
        total = total * shrink + share
        mixed = mixed * shrink[:, None] + share[:, None] * value.to(tl.float32)
        top = highest
    weight = tl.exp(top - tl.max(top, axis=0))
    mixed = tl.sum(mixed * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    if COARSE:
        mixed *= tl.load(value_steps + (slot * heads + head) * WIDTH + across, mask=inside, other=0.0)
    tl.store(out + (row * heads + head) * WIDTH + across, mixed.to(out.dtype.element_ty), mask=inside)
