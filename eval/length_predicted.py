"""How many times as fast exits would be at other lengths: predictions by a measured cost table, nothing is decoded.

An engine's cost table is measured at a source length and batch size (serve.measure), and calm.simulate adds its entries
up for answers of any length: at full depth under rule ``own``, and with exits of trace tight (mean depth of Table 1 of
arXiv 2407.20272) under rule ``compact``. A table's layer costs the same at every position of an answer: it was measured
over rows at any of them.
"""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.config import BatchRule, Device, Measure, RunnerName, TraceKind
from calm.cost import CostTable
from calm.engine_config import ServingConfig
from calm.experiment_config import LengthConfig
from calm.metrics import bootstrap_ci
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine, Simulated
from calm.traces import draw, table1_depth

if TYPE_CHECKING:
    from .workload import Workload

Depths = tuple[tuple[int, ...], ...]


@dataclass
class Predictor:
    """A shape's engines, and what their cost tables say; the model is built when it is first needed."""

    config: LengthConfig

    @cached_property
    def dtype(self) -> str:
        """That was asked for, or int8 where the native runner is and else fp32."""
        from serve.backend import pick

        native = pick(RunnerName.auto, "cpu") is RunnerName.native
        return self.config.dtype or ("int8" if native else "fp32")

    @cached_property
    def workload(self) -> "Workload":
        """The shape with random weights, as eval.throughput times it."""
        import torch

        from .workload import shape_workload

        config = self.config
        torch.set_num_threads(config.threads)
        few, many = min(config.outputs), max(config.outputs)
        asked = ServingConfig(
            shape=config.shape, source_tokens=list(config.sources), batches=list(config.batches),
            measures=[config.measure], dtype=self.dtype, device=Device.cpu, few=min(few, many - 1), many=many,
            seed=config.seed,
        )  # fmt: skip
        return shape_workload(asked, config.shape)

    def depths(self, batch: int, tokens: int) -> list[Depths]:
        """Drawn per token around Table 1's mean; of every draw, so many rows of so many tokens."""
        from .shapes import PAPER_NAMES

        layers, config = self.workload.num_layers, self.config
        mean = table1_depth(PAPER_NAMES.get(config.shape, ""), config.measure, layers)
        rows = draw(TraceKind.tight, layers, mean, batch * config.draws, tokens, config.seed).depths
        return [rows[first : first + batch] for first in range(0, len(rows), batch)]

    def measured(self, source: int, batch: int) -> tuple[CostTable, Setting, dict[str, Any]]:
        """The table of an engine of this batch; and which runner, which clock, and ``lost``: the share of the time in
        which others had the processor. One thread is timed by its processor time, so that this is not counted.

        Raises:
            CalmError: the engine cannot be had.
        """
        from serve.measure import measure, setting_of

        config, engine = self.config, self.workload.engine(batch, BatchRule.compact)
        if config.threads == 1:
            engine.clock.now = time.thread_time
        began, ran = time.perf_counter(), time.process_time()
        table = measure(engine, config.repeats, [{config.measure}], [source])
        lost = 1.0 - (time.process_time() - ran) / max(time.perf_counter() - began, 1e-9)
        clock = "processor time of the thread" if config.threads == 1 else "wall clock"
        return table, setting_of(engine), {
            "runner": engine.runner_name.value, "clock": clock, "lost": max(0.0, lost)
        }  # fmt: skip

    def rows(self, source: int, batch: int) -> list[dict[str, Any]]:
        """A record for each length of the answers."""
        table, setting, about = self.measured(source, batch)
        about |= {"shape": self.config.shape, "dtype": self.dtype, "layers": setting.num_layers}
        about |= {"layer_s": table.at("layer", batch), "head_s": table.at("head", batch)}
        drawn = self.depths(batch, max(self.config.outputs))
        return [
            {"tokens": tokens, **about, **predicted(table, setting, drawn, source, tokens, self.config)}
            for tokens in self.config.outputs
        ]


def predicted(
    table: CostTable, setting: Setting, drawn: list[Depths], source: int, tokens: int, config: LengthConfig
) -> dict[str, float]:
    """Full depth over exits by the table, for answers of ``tokens`` tokens that all begin together.

    Returns:
        ``call_ratio``: of a whole call, encoder included; ``step_ratio``: of a decode step, what the tokens from the
        second on take; each with the 95 % interval that the draws of depths leave. ``full_call_s``, ``exit_call_s``,
        ``full_step_s``, ``exit_step_s``: predicted seconds; ``prefill_share``: of the call at full depth, what encoder
        and admission take; ``mean_depth``: of the exits.
    """
    batch, asked = len(drawn[0]), frozenset({config.measure})
    top: Depths = ((setting.num_layers,) * tokens,) * batch
    exits = [[row[:tokens] for row in depths] for depths in drawn]
    full = simulated(table, setting, BatchRule.own, list(top), source)
    full_first = simulated(table, setting, BatchRule.own, [row[:1] for row in top], source).seconds
    calls, steps = [], []
    for depths in exits:
        call = simulated(table, setting, BatchRule.compact, depths, source, asked).seconds
        first = simulated(table, setting, BatchRule.compact, [row[:1] for row in depths], source, asked).seconds
        calls.append(call)
        steps.append((call - first) / (tokens - 1))
    found: dict[str, float] = {}
    for name, over, under in (
        ("call", full.seconds, calls),
        ("step", (full.seconds - full_first) / (tokens - 1), steps),
    ):
        low, high = bootstrap_ci(under, config.seed, config.bootstrap)
        mean = float(np.mean(under))
        found |= {f"{name}_ratio": over / mean, f"{name}_ratio_low": over / high, f"{name}_ratio_high": over / low}
        found |= {f"full_{name}_s": over, f"exit_{name}_s": mean}
    prefill = sum(step.seconds.get("prefill", 0.0) for step in full.steps)
    return {**found, "prefill_share": prefill / full.seconds, "mean_depth": float(np.mean(exits))}


def simulated(
    table: CostTable,
    setting: Setting,
    rule: BatchRule,
    depths: list[tuple[int, ...]],
    source: int,
    measures: frozenset[Measure] = frozenset(),
) -> Simulated:
    """One batch from its sources to its answers."""
    return SimEngine(table, setting, Rule(rule)).run([Trace(row, source, measures=measures) for row in depths])
