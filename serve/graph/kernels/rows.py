"""What is decided row by row: confidences without the vocabulary, who crosses, who runs on."""

import triton
import triton.language as tl


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
    BLOCK: tl.constexpr,
):
    """Cosine with the layer before, and P(exit)."""
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
        if STATE >= 0:
            before = tl.load(previous + row * d + at, mask=inside, other=0.0).to(tl.float32)
            dot += now * before
            mine += now * now
            theirs += before * before
        if CLASSIFIER >= 0:
            linear += now * tl.load(weight + at, mask=inside, other=0.0)
    if STATE >= 0:
        if asked == STATE:
            # torch.nn.functional.cosine_similarity: neither norm below 1e-8
            length = tl.maximum(tl.sqrt(tl.sum(mine, axis=0)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(theirs, axis=0)), 1e-8)
            cosine = tl.sum(dot, axis=0) / length
            cosine = tl.where(cosine != cosine, cosine, tl.minimum(tl.maximum(cosine, 0.0), 1.0))
            if FIRST:
                cosine = float("nan")
            tl.store(confidence + row, cosine)
    if CLASSIFIER >= 0:
        if asked == CLASSIFIER:
            tl.store(confidence + row, tl.sigmoid(tl.sum(linear, axis=0) + offset))


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
):
    """calm.rules.Rule.stop and the bookkeeping around it, one program for all rows."""
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
