"""What filling skipped layers takes on the clock, of what running them would: ``project`` by ``true``."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calm.config import BatchRule
from calm.cost import backfilling
from calm.experiment_config import BackfillConfig

from .shallow_ways import engine_of
from .trials import Row

if TYPE_CHECKING:
    from calm.models.t5 import EarlyExitT5
    from calm.records import Example
    from serve.engine import Engine

RULE = BatchRule.compact


def passes(
    config: BackfillConfig, folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", positions: Sequence[int]
) -> list[Row]:
    """``true`` at batch 1 as the engine can do it: several positions that left early, one pass of the layers above.

    Returns:
        ``pass_s``: of so many positions through so many layers, left out where an answer has fewer; ``of_layers``: by
        as many passes of one position; ``fill_of_pass``: projecting their keys and values instead, of the pass. Of an
        fp32 engine, a thread's own processor time where it has one.
    """
    from serve.measure import measure_passes, most_positions

    engine, lengths = timed_engine(folder, model, articles, 1)
    fitting = sorted({1, *(count for count in positions if count <= most_positions(engine))})
    seconds = measure_passes(engine, fitting, config.clock_repeats, lengths)
    filled = filling(config, engine, lengths, 1)
    return [
        {
            "kind": "pass", "batch": 1, "skipped": above, "positions": count, "runner": engine.runner_name.value,
            "pass_s": taken, "of_layers": taken / (count * seconds[above, 1]),
            "fill_of_pass": count * filled[above] / taken,
        }
        for (above, count), taken in sorted(seconds.items())
        if count in positions
    ]  # fmt: skip


def timed_engine(
    folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", batch: int
) -> "tuple[Engine, list[int]]":
    """An fp32 engine whose clock is its thread's own where it has one, and the articles' lengths."""
    import torch

    from serve.model import served

    target = served(model, folder=folder)
    engine = engine_of(target, RULE, "fp32", batch, batch)
    if torch.get_num_threads() == 1:
        engine.clock.now = time.thread_time
    return engine, [len(target.to_ids(each.source)) for each in articles[:64]]


def filling(config: BackfillConfig, engine: "Engine", lengths: Sequence[int], batch: int) -> dict[int, float]:
    """Seconds of projecting the keys and values of a step's skipped layers, by how many; 0 those of running one."""
    from serve.measure import measure, setting_of

    table, packed = measure(engine, config.clock_repeats, None, lengths), setting_of(engine).packed
    found = {0: table.at("layer", batch)}
    for skipped in range(1, engine.model.spec.num_layers):
        once = table.at(backfilling(skipped if packed else 1), batch)
        found[skipped] = once if packed else skipped * once
    return found


def clocks(
    config: BackfillConfig, folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", batch: int
) -> list[Row]:
    """For each number of skipped layers, by a cost table of an fp32 engine of this batch size.

    Returns:
        ``fill_s``: projecting the keys and values of so many layers; ``layers_s``: running them; ``of_true``: the
        first by the second. A thread's own processor time where the engine has one thread.
    """
    engine, lengths = timed_engine(folder, model, articles, batch)
    filled = filling(config, engine, lengths, batch)
    layer = filled.pop(0)
    return [
        {
            "kind": "clock", "batch": batch, "skipped": skipped, "runner": engine.runner_name.value,
            "fill_s": fill, "layers_s": skipped * layer, "of_true": fill / (skipped * layer),
        }
        for skipped, fill in filled.items()
    ]  # fmt: skip
