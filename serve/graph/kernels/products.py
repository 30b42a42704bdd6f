"""Products of a few rows with a weight matrix, with the norm before and the sum after them.

Where a product is of normed rows, its weights hold the norm's gain: weight * gain (packing.py).
"""

import triton
import triton.language as tl

from .ahead import take_turn


@triton.jit
def _product(
    x,
    rows,
    there,
    weight,
    cols,
    known,  # columns that there are
    k,
    eps,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of ``x`` by rows ``cols`` of ``weight``: (ROWS, BLOCK_N), summed in fp32.

    NORMED: of the rows over their root mean square; the norm's gain is in the weights (packing.py). Squares are summed
    beside the products, which are divided at the end, so rows are read once and no weight waits for a norm.

    One row is no work for tensor cores: it is multiplied number by number, and sums meet after the last block.
    """
    summed: tl.constexpr = (BLOCK_N, BLOCK_K) if ROWS == 1 else (ROWS, BLOCK_N)
    total = tl.zeros(summed, dtype=tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < k
        by = tl.load(weight + cols[:, None] * k + at[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        values = tl.load(x + rows[:, None] * k + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if NORMED:
            squares += values.to(tl.float32) * values.to(tl.float32)
        if ROWS == 1:
            total += values.to(tl.float32) * by.to(tl.float32)
        else:
            total = tl.dot(values.to(by.dtype), tl.trans(by), total, input_precision="ieee")
    if ROWS == 1:
        total = tl.sum(total, axis=1)[None, :]
    if NORMED:
        total *= tl.rsqrt(tl.sum(squares, axis=1) / k + eps)[:, None]
    return total


@triton.jit
def _active(active, order, ROWS: tl.constexpr):
    """Rows of this program's tile, and which of them are there. ROWS is 1 in a bucket of one row: no look-up."""
    many = tl.load(active)
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ROWS == 1:
        return lanes.to(tl.int64), lanes < many
    there = lanes < many
    return tl.load(order + lanes, mask=there, other=0).to(tl.int64), there


@triton.jit
def linear_kernel(
    x,  # (B, k)
    weight,  # (n, k), with the gain where NORMED
    out,  # (B, n); where ADDS it is added to
    crossed,  # (B,) rows that are held are not written
    order,
    active,
    n,
    k,
    eps,
    NORMED: tl.constexpr,
    ADDS: tl.constexpr,
    HOLDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """x @ weight, of the normed rows or of the rows as they are, into a buffer or onto the residual stream."""
    take_turn(AHEAD)
    if tl.program_id(0) * ROWS >= tl.load(active):
        return
    rows, there = _active(active, order, ROWS)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _product(x, rows, there, weight, cols, cols < n, k, eps, NORMED, ROWS, BLOCK_N, BLOCK_K, STAGES)
    target = out + rows[:, None] * n + cols[None, :]
    write = there[:, None] & (cols < n)[None, :]
    if HOLDS:
        write = write & (tl.load(crossed + rows, mask=there, other=1) == 0)[:, None]
    if ADDS:
        before = tl.load(target, mask=write, other=0.0)
        tl.store(target, before + total.to(before.dtype), mask=write)
    else:
        tl.store(target, total.to(out.dtype.element_ty), mask=write)


@triton.jit
def qkv_kernel(
    x,  # (B, k)
    weight,  # (3 * heads * width, k) with the gain: queries, keys, values
    queries,  # (B, heads * width)
    keys,  # (slots, heads, positions, width) of the layer
    values,
    previous,  # (B, k): takes x as it is, where KEEPS
    slots,
    steps,
    order,
    active,
    heads,
    positions,
    k,
    eps,
    KEEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Queries to a buffer, keys and values to their places in the caches."""
    take_turn(AHEAD)
    if tl.program_id(0) * ROWS >= tl.load(active):
        return
    rows, there = _active(active, order, ROWS)
    one = heads * WIDTH
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _product(x, rows, there, weight, cols, cols < 3 * one, k, eps, True, ROWS, BLOCK_N, BLOCK_K, STAGES)
    which, within = cols // one, cols % one
    slot = tl.load(slots + rows, mask=there, other=0)
    step = tl.load(steps + rows, mask=there, other=0)
    place = (slot[:, None] * heads + (within // WIDTH)[None, :]) * positions + step[:, None]
    place = place * WIDTH + (within % WIDTH)[None, :]
    found = total.to(queries.dtype.element_ty)
    tl.store(queries + rows[:, None] * one + within[None, :], found, mask=there[:, None] & (which == 0)[None, :])
    tl.store(keys + place, found, mask=there[:, None] & (which == 1)[None, :])
    tl.store(values + place, found, mask=there[:, None] & (which == 2)[None, :])
    if KEEPS:  # each program a slice
        for start in range(tl.program_id(1) * BLOCK_N, k, tl.num_programs(1) * BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            part = there[:, None] & (at < k)[None, :]
            kept = rows[:, None] * k + at[None, :]
            tl.store(previous + kept, tl.load(x + kept, mask=part, other=0.0), mask=part)


@triton.jit
def _activated(values, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "gelu_new":
        inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        return values * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(inner))
    if ACTIVATION == "silu":
        return values * tl.sigmoid(values)
    return 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))


@triton.jit
def inner_kernel(
    x,  # (B, k)
    weight,  # (n, k) with the gain; where GATED a row of gate and a row of up in turn
    out,  # (B, n); (B, n / 2) where GATED
    order,
    active,
    n,
    k,
    eps,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The feed-forward's inner values: activation(x @ gate) * (x @ up), or activation(x @ up)."""
    take_turn(AHEAD)
    if tl.program_id(0) * ROWS >= tl.load(active):
        return
    rows, there = _active(active, order, ROWS)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _product(x, rows, there, weight, cols, cols < n, k, eps, True, ROWS, BLOCK_N, BLOCK_K, STAGES)
    kind = weight.dtype.element_ty
    total = total.to(kind).to(tl.float32)  # each product is rounded as it would be if it were stored
    if GATED:
        gates, ups = tl.split(tl.reshape(total, (ROWS, BLOCK_N // 2, 2)))
        inner = _activated(gates, ACTIVATION).to(kind).to(tl.float32) * ups
        cols, n = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), n // 2
    else:
        inner = _activated(total, ACTIVATION)
    write = there[:, None] & (cols < n)[None, :]
    tl.store(out + rows[:, None] * n + cols[None, :], inner.to(kind).to(out.dtype.element_ty), mask=write)


@triton.jit
def backfill_kernel(
    x,  # (B, k)
    weights,  # (L, 3 * heads * width, k) with the gain: queries, keys, values
    keys,  # (L, slots, heads, positions, width)
    values,
    slots,
    steps,
    executed,  # (B,) layers that a row has K and V of
    count,  # rows that are live: the first ones
    all_slots,
    heads,
    positions,
    k,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """K and V of the layers above ``executed``, all layers in one launch; a tile whose rows all have them returns."""
    take_turn(AHEAD)
    layer = tl.program_id(2)  # from 0
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < tl.load(count)
    there = live & (tl.load(executed + rows, mask=live, other=1 << 30) <= layer)
    if tl.sum(there.to(tl.int32), axis=0) == 0:
        return
    one = heads * WIDTH
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = weights + (layer.to(tl.int64) * 3 + 1) * one * k
    total = _product(x, rows, there, weight, cols, cols < 2 * one, k, eps, True, ROWS, BLOCK_N, BLOCK_K, STAGES)
    which, within = cols // one, cols % one
    slot = tl.load(slots + rows, mask=there, other=0)
    step = tl.load(steps + rows, mask=there, other=0)
    place = ((layer.to(tl.int64) * all_slots + slot[:, None]) * heads + (within // WIDTH)[None, :]) * positions
    place = (place + step[:, None]) * WIDTH + (within % WIDTH)[None, :]
    found = total.to(keys.dtype.element_ty)
    tl.store(keys + place, found, mask=there[:, None] & (which == 0)[None, :])
    tl.store(values + place, found, mask=there[:, None] & (which == 1)[None, :])
