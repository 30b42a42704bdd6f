"""Layers by position where requests come and go: how many layers are called for a token, counted from recorded lengths.

SkipDecode's batch begins together, so a step has one set of layers, and rows that have ended leave their places empty.
In continuous batching a place is filled at once, rows stand at different positions, and a layer is called where any of
them runs it. A count of calls is what time follows where a call takes as long for few rows as for many; it is no clock.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from calm.layer_schedule import LayerSchedule


def slot_row(
    schedule: LayerSchedule, num_layers: int, lengths: Sequence[int], slots: int, first: int
) -> dict[str, Any]:
    """Layer calls per decoded token of the answers, ``slots`` of them at a time.

    Args:
        lengths: tokens of each answer, in the order of their requests.
        first: the first step that the decoder runs: 1 where the prompt says the first token, else 0.

    Returns:
        ``row_layers``: layers that a token runs itself. Calls per token: ``together``, batches that begin together;
        ``continuous``, a call serves all rows that run the layer; ``banded``, rows of one set of layers step by
        themselves; ``full_depth``, continuous, all layers.
    """
    steps = [range(first, length) for length in lengths if length > first]
    active = [schedule.layers(step, num_layers) for step in range(max((each.stop for each in steps), default=first))]
    tokens = sum(map(len, steps))
    if not tokens:
        return {"slots": slots, "tokens": 0}
    together = sum(
        len(active[step])
        for begin in range(0, len(steps), slots)
        for step in range(first, max(each.stop for each in steps[begin : begin + slots]))
    )
    waiting, running = deque(steps), list[list[int]]()  # each running row: its step, and where it ends
    union = banded = full = 0
    while waiting or running:
        while waiting and len(running) < slots:
            row = waiting.popleft()
            running.append([row.start, row.stop])
        sets = {active[step] for step, _ in running}
        union += len(set().union(*sets))
        banded += sum(map(len, sets))
        full += num_layers
        running = [[step + 1, stop] for step, stop in running if step + 1 < stop]
    return {
        "slots": slots,
        "tokens": tokens,
        "row_layers": sum(len(active[step]) for each in steps for step in each) / tokens,
        "together": together / tokens,
        "continuous": union / tokens,
        "banded": banded / tokens,
        "full_depth": full / tokens,
    }
