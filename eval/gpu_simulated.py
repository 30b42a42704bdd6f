"""How fast would it be at every batch size? The part of eval.gpu_check that asks a cost table instead of a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from calm.config import BatchRule, Device, RunnerName
from calm.engine_config import ServingConfig
from calm.rules import Rule
from calm.sim_rows import Trace

from .gpu_asked import MEASURES, RULES, SOURCE, TRACES, Asked, Record
from .serving_cells import decode_step
from .sessions import between

if TYPE_CHECKING:
    from calm.cost import CostTable

    from .workload import Workload

LARGEST = 256  # rows
REPEATS = 3  # of the table


@torch.inference_mode()
def simulated(asked: Asked) -> Record:
    """One cost table a shape, and by it a decode step at every power of two up to 256 rows: nothing is timed whole.

    Each exit beside full depth, and beside static depth of the same mean.
    """
    return {shape: _of_shape(asked.device, shape) for shape in dict.fromkeys(asked.shapes)}


def _of_shape(device: str, shape: str) -> Record:
    from serve.measure import measure

    from .workload import shape_workload

    large = device == "cuda"
    most = LARGEST if large else 4
    config = ServingConfig(
        shape=shape, source_tokens=[SOURCE if large else 16], batches=[2**n for n in range(most.bit_length())],
        measures=list(MEASURES), rules=list(RULES), traces=list(TRACES),
        dtype="bf16", runner=RunnerName.graph, device=Device(device), few=8, many=72 if large else 12,
    )  # fmt: skip
    workload = shape_workload(config, shape)
    engine = workload.engine(most, buckets=tuple(config.batches))
    asked = [{each} for each in config.measures]
    table = measure(engine, REPEATS if large else 1, asked, config.source_tokens)
    return {"source_tokens": config.source_tokens[0], "rows": _rows(workload, engine, table)}


def _rows(workload: Workload, engine: Any, table: CostTable) -> list[dict[str, Any]]:
    """Of every exit and batch size: seconds of a decode step, and of its baselines over it."""
    from serve.measure import setting_of

    config, setting = workload.config, setting_of(engine)
    few, many = config.few, config.many

    def seconds(rule: BatchRule, traces: Sequence[Trace]) -> float:
        return decode_step(table, setting, Rule(rule), traces, few, many)

    @cache
    def static(depth: int, batch: int) -> float:
        plain = Trace((depth,) * many, config.source_tokens[0], fills=False)
        return seconds(BatchRule.own, [plain] * batch)

    rows = []
    for entry in workload.entries():
        if entry.measure is None or entry.trace is None:
            continue
        drawn = workload.traces(entry.trace, entry.measure)
        made = Trace((), config.source_tokens[0], measures=frozenset({entry.measure}))
        for batch in config.batches:
            mine = seconds(entry.rule, [replace(made, depths=depths) for depths in drawn.depths[:batch]])
            full = static(workload.num_layers, batch)
            same = between(drawn.mean(few, many, batch), lambda depth, rows=batch: [static(depth, rows)])[0]  # type: ignore[misc]
            rows.append(
                {
                    "batch": batch,
                    "measure": entry.measure.value,
                    "rule": entry.rule.value,
                    "trace": entry.trace,
                    "decode_step_s": mine,
                    "full_depth_s": full,
                    "over_full": full / mine,
                    "over_static": same / mine,
                }
            )
    return rows
