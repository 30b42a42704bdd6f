"""Attention of one query a row over the keys of its slot, of whatever length, in one pass."""

import triton
import triton.language as tl


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
    BLOCK: tl.constexpr,
):
    """One program a row and head: a row with a short source reads no more than that."""
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    if BIASED:
        length = tl.load(lengths + row) + 1
    else:
        length = tl.load(lengths + slot).to(tl.int64)
    across = tl.arange(0, WIDE)
    inside = across < WIDTH
    query = tl.load(queries + (row * heads + head) * WIDTH + across, mask=inside, other=0.0).to(tl.float32)
    base = (slot * heads + head) * positions
    top = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    mixed = tl.zeros((WIDE,), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < length
        place = (base + at)[:, None] * WIDTH + across[None, :]
        part = there[:, None] & inside[None, :]
        key = tl.load(keys + place, mask=part, other=0.0).to(tl.float32)
        score = tl.sum(key * query[None, :], axis=1) * scale
        if COARSE:
            score *= tl.load(key_steps + base + at, mask=there, other=0.0)
        if BIASED:
            score += tl.load(bias + head * positions + (length - 1 - at), mask=there, other=0.0)
        score = tl.where(there, score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, axis=0))
        share = tl.exp(score - highest)
        shrink = tl.exp(top - highest)
        value = tl.load(values + place, mask=part, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(share, axis=0)
        mixed = mixed * shrink + tl.sum(share[:, None] * value, axis=0)
        top = highest
    mixed = mixed / total
    if COARSE:
        mixed *= tl.load(value_steps + (slot * heads + head) * WIDTH + across, mask=inside, other=0.0)
    tl.store(out + (row * heads + head) * WIDTH + across, mixed.to(out.dtype.element_ty), mask=inside)
