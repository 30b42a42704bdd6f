"""What is decided row by row: confidences without the vocabulary, who crosses, who runs on."""

import triton
import triton.language as tl

from .ahead import take_turn


@triton.jit
def states_kernel(
    hidden,  # (B, d)
    previous,
    weight,  # (d,) of the classifier, fp32
    offset,  # its bias
    measures,  # (B,)
    confidence,  # (B,)
    order,
    active,
    d,
    STATE: tl.constexpr,  # index of the measure ``state``; -1: nobody asks
    CLASSIFIER: tl.constexpr,
    FIRST: tl.constexpr,  # there is no layer before this one
    ALONE: tl.constexpr,  # no other kernel tells confidences here: rows of other measures get NaN
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Cosine with the layer before, and P(exit)."""
    take_turn(AHEAD)
    if tl.program_id(0) >= tl.load(active):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    asked = tl.load(measures + row)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    mine = tl.zeros((BLOCK,), dtype=tl.float32)
    theirs = tl.zeros((BLOCK,), dtype=tl.float32)
    linear = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, d, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < d
        now = tl.load(hidden + row * d + at, mask=inside, other=0.0).to(tl.float32)
        if STATE >= 0 and not FIRST:
            before = tl.load(previous + row * d + at, mask=inside, other=0.0).to(tl.float32)
            dot += now * before
            mine += now * now
            theirs += before * before
        if CLASSIFIER >= 0:
            linear += now * tl.load(weight + at, mask=inside, other=0.0)
    sure = tl.full((), float("nan"), dtype=tl.float32)
    if STATE >= 0 and not FIRST:
        # torch.nn.functional.cosine_similarity: neither norm below 1e-8
        length = tl.maximum(tl.sqrt(tl.sum(mine, axis=0)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(theirs, axis=0)), 1e-8)
        cosine = tl.sum(dot, axis=0) / length
        cosine = tl.where(cosine != cosine, cosine, tl.minimum(tl.maximum(cosine, 0.0), 1.0))
        sure = tl.where(asked == STATE, cosine, sure)
    if CLASSIFIER >= 0:
        sure = tl.where(asked == CLASSIFIER, tl.sigmoid(tl.sum(linear, axis=0) + offset), sure)
    if ALONE:
        tl.store(confidence + row, sure)
    else:
        tl.store(confidence + row, sure, mask=(asked == STATE) | (asked == CLASSIFIER))


@triton.jit(do_not_specialize=["size", "num_layers", "layer"])
def settle_kernel(
    live,
    runs,
    crossed,
    crossing,
    depths,
    confidence,
    thresholds,  # (B, L)
    stopped,  # ()
    layers,  # ()
    order,
    active,
    size,
    num_layers,
    share,
    layer,
    CONFIDENT: tl.constexpr,
    LEAVES: tl.constexpr,
    RULE: tl.constexpr,  # "all", "quantile", "lockstep"
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """calm.rules.Rule.stop and the bookkeeping around it, one program for all rows."""
    take_turn(AHEAD)
    row = tl.arange(0, BLOCK)
    there = row < size
    alive = (tl.load(live + row, mask=there, other=0) != 0) & there
    running = (tl.load(runs + row, mask=there, other=0) != 0) & there
    depth = tl.load(depths + row, mask=there, other=0)
    now = (depth > 0) & (depth <= layer)
    if CONFIDENT:
        least = tl.load(thresholds + row * num_layers + layer - 1, mask=there, other=float("inf"))
        now = now | (tl.load(confidence + row, mask=there, other=0.0) >= least)
    now = now & running
    before = (tl.load(crossed + row, mask=there, other=0) != 0) & there
    where = tl.load(crossing + row, mask=there, other=0)
    tl.store(crossing + row, tl.where(now & (before == 0), layer, where), mask=there)
    after = before | now
    tl.store(crossed + row, after, mask=there)
    many = tl.sum(alive.to(tl.int32), axis=0)
    if RULE == "lockstep":
        ends = tl.sum((alive & (now == 0)).to(tl.int32), axis=0) == 0
    elif RULE == "quantile":
        ends = tl.sum((alive & after).to(tl.int32), axis=0) >= share * many
    else:
        ends = tl.sum((alive & (after == 0)).to(tl.int32), axis=0) == 0
    over = tl.load(stopped) != 0
    tl.store(layers, tl.where(over, tl.load(layers), layer))
    over = over | ends | (layer == num_layers)
    tl.store(stopped, over)
    on = alive & (over == 0)
    if LEAVES:
        on = on & (after == 0)
    tl.store(runs + row, on, mask=there)
    rest = there & (on == 0)
    left = tl.sum(on.to(tl.int32), axis=0)
    place = tl.where(on, tl.cumsum(on.to(tl.int32), axis=0) - 1, left + tl.cumsum(rest.to(tl.int32), axis=0) - 1)
    tl.store(order + place, row, mask=there)
    tl.store(active, left)


@triton.jit(do_not_specialize=["size", "num_layers"])
def begin_kernel(
    given,  # (5, B): slot, step, token, chained, live
    position,  # by slot, as the step before left them
    token,
    all_thresholds,  # (slots, positions, L)
    all_depths,  # (slots, positions)
    all_measures,  # (slots,)
    all_run_lengths,
    embed,  # (vocab, d)
    slots,  # from here on of the frame
    steps,
    tokens,
    live,
    thresholds,
    depths,
    measures,
    run_lengths,
    hidden,  # (B, d)
    crossed,
    crossing,
    runs,
    run,
    stopped,
    layers,
    order,
    active,
    count,  # rows that are live: the first ones
    size,
    positions,
    num_layers,
    d,
    LAYERS: tl.constexpr,  # the power of two that holds num_layers
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # the power of two that holds the bucket
    AHEAD: tl.constexpr,
):
    """Who is here, what each row decodes and when it may leave; hidden states of the tokens. One program a row."""
    take_turn(AHEAD)
    row = tl.program_id(0)
    slot = tl.load(given + row)
    chained = tl.load(given + 3 * size + row) > 0
    there = tl.load(given + 4 * size + row) > 0
    step = tl.where(chained, tl.load(position + slot), tl.load(given + size + row))
    word = tl.where(chained, tl.load(token + slot), tl.load(given + 2 * size + row))
    tl.store(slots + row, slot)
    tl.store(steps + row, step)
    tl.store(tokens + row, word)
    tl.store(live + row, there)
    tl.store(runs + row, there)
    tl.store(order + row, row)
    layer = tl.arange(0, LAYERS)
    known = layer < num_layers
    at = (slot * positions + step) * num_layers
    tl.store(thresholds + row * num_layers + layer, tl.load(all_thresholds + at + layer, mask=known), mask=known)
    tl.store(depths + row, tl.load(all_depths + slot * positions + step))
    tl.store(measures + row, tl.load(all_measures + slot))
    tl.store(run_lengths + row, tl.load(all_run_lengths + slot))
    tl.store(crossed + row, False)
    tl.store(crossing + row, num_layers.to(tl.int64))
    tl.store(run + row, tl.zeros((), dtype=tl.int64))
    for start in range(0, d, BLOCK):
        across = start + tl.arange(0, BLOCK)
        inside = across < d
        tl.store(hidden + row * d + across, tl.load(embed + word * d + across, mask=inside), mask=inside)
    if row == 0:
        all_rows = tl.arange(0, ROWS)
        many = tl.sum((tl.load(given + 4 * size + all_rows, mask=all_rows < size, other=0) > 0).to(tl.int32), axis=0)
        tl.store(active, many)
        tl.store(count, many)
        tl.store(stopped, False)
        tl.store(layers, tl.zeros((), dtype=tl.int64))


@triton.jit(do_not_specialize=["size", "num_layers"])
def speak_kernel(
    chosen,  # (B,) the word of each row
    crossed,
    crossing,
    layers,  # () after which the step ended
    live,
    slots,
    steps,
    said,  # (5, B): token, crossing, emission, executed, involuntary
    executed,  # (B,) layers whose K and V need no filling
    fills,  # by slot: whether somebody reads K and V above a fixed depth
    position,  # by slot: what the next step begins with
    token,
    size,
    num_layers,
    HOLDS: tl.constexpr,
    LEAVES: tl.constexpr,
    EXACT: tl.constexpr,  # a row stands for itself: what nobody reads of it is not filled
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What the rows said, and what their slots decode next; one program for all rows."""
    take_turn(AHEAD)
    row = tl.arange(0, BLOCK)
    there = row < size
    alive = (tl.load(live + row, mask=there, other=0) != 0) & there
    word = tl.load(chosen + row, mask=there, other=0)
    where = tl.load(crossing + row, mask=there, other=0)
    last = tl.load(layers) + tl.zeros((BLOCK,), dtype=tl.int64)
    emission = tl.minimum(where, last) if HOLDS else last
    ran = emission if LEAVES else last
    early = (tl.load(crossed + row, mask=there, other=1) == 0) & (emission < num_layers)
    tl.store(said + row, word, mask=there)
    tl.store(said + size + row, where, mask=there)
    tl.store(said + 2 * size + row, emission, mask=there)
    tl.store(said + 3 * size + row, ran, mask=there)
    tl.store(said + 4 * size + row, early.to(tl.int64), mask=there)
    slot = tl.load(slots + row, mask=there, other=0)
    if EXACT:
        ran = tl.where(tl.load(fills + slot, mask=there, other=0) != 0, ran, num_layers)
    tl.store(executed + row, ran, mask=there)
    tl.store(position + slot, tl.load(steps + row, mask=there, other=0) + 1, mask=alive)
    tl.store(token + slot, tl.maximum(word, 0), mask=alive)
