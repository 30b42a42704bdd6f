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

RULE = BatchRule.compact


def clocks(
    config: BackfillConfig, folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", batch: int
) -> list[Row]:
    """For each number of skipped layers, by a cost table of an fp32 engine of this batch size.

    Returns:
        ``fill_s``: projecting the keys and values of so many layers; ``layers_s``: running them; ``of_true``: the
        first by the second. A thread's own processor time where the engine has one thread.
    """
    import torch

    from serve.measure import measure, setting_of
    from serve.model import served

    target = served(model, folder=folder)
    engine, last = engine_of(target, RULE, "fp32", batch, batch), target.spec.num_layers
    if torch.get_num_threads() == 1:
        engine.clock.now = time.thread_time
    lengths = [len(target.to_ids(each.source)) for each in articles[:64]]
    table, packed = measure(engine, config.clock_repeats, None, lengths), setting_of(engine).packed
    layer, rows = table.at("layer", batch), list[Row]()
    for skipped in range(1, last):
        once = table.at(backfilling(skipped if packed else 1), batch)
        fill = once if packed else skipped * once
        rows.append(
            {
                "kind": "clock", "batch": batch, "skipped": skipped, "runner": engine.runner_name.value,
                "fill_s": fill, "layers_s": skipped * layer, "of_true": fill / (skipped * layer),
            }
        )  # fmt: skip
    return rows
