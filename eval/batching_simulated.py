"""What cost tables and recorded depths say of a batch size: the simulator in the place of the engine.

Depths and lengths come from one recording of each way, which is right for full and static depth and for the row-exact
rules whatever the batch. Under sync, quantile and lockstep mates decide what a row says, so theirs are those that the
row has alone; and a recorded depth does not say whether a confidence falls again, as lockstep would see.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, Measure
from calm.cost import CostTable
from calm.experiment_config import BatchingConfig
from calm.metrics import with_median
from calm.rules import Rule
from calm.sim_rows import Setting, Trace
from calm.simulate import SimEngine, Simulated

from .sessions import FULL, between, neighbours
from .timed_folder import exit_entry, plain_entry, timed_engine, turns_of
from .workload import Entry, Workload

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.requests import Answer

FILLED = 4  # batches that are answered one after another at least, so that a batch is full most of the time
RATES = ("tokens_per_s", "decode_tokens_per_s")
FIGURES = (*RATES, "latency_s")
BETWEEN = "static"  # the whole depths around the exits' mean, interpolated


@dataclass(frozen=True)
class Way:
    """A way of decoding; ``share``: of rule quantile."""

    name: str
    entry: Entry
    share: float = 0.5

    @property
    def plain(self) -> bool:
        return self.entry.role != "exit"

    def rule(self) -> Rule:
        return Rule(self.entry.rule, self.share)


@dataclass
class Ground:
    """What all batch sizes have in common: the ways, what each way's rows do when nobody disturbs them, and what the
    parts of a step cost.

    Args:
        folder: where cost tables are kept, so that a run that goes on has those that it began with.
    """

    config: BatchingConfig
    workload: Workload
    folder: Path
    _costs: dict[int, tuple[CostTable, Setting]] = field(default_factory=dict)

    @cached_property
    def recorded(self) -> "dict[str, list[Answer]]":
        """Answers of full depth, of row-exact exits, and of the static depths around their mean."""
        engine = self.workload.engine(max(self.config.batches))
        found: dict[str, list[Answer]] = {}
        for entry in (plain_entry(), exit_entry(self.workload, BatchRule.own)):
            found[entry.name] = self._answers(engine, entry)
        for depth in neighbours(mean_layers(found[BatchRule.own.value])):
            if depth < self.workload.num_layers:
                found[self.static_name(depth)] = self._answers(engine, plain_entry(depth))
        return found

    def _answers(self, engine: "Engine", entry: Entry) -> "list[Answer]":
        turns = turns_of(entry, engine, self.workload)
        turns(len(self.workload.articles))
        return turns.answers

    def static_name(self, depth: int) -> str:
        return FULL if depth == self.workload.num_layers else f"static {depth}"

    @cached_property
    def mean(self) -> float:
        """Mean layer of a token under the row-exact rules."""
        return mean_layers(self.recorded[BatchRule.own.value])

    @cached_property
    def ways(self) -> dict[str, Way]:
        """Full depth first, the static depths around the exits' mean, then every rule."""
        plain = [Way(FULL, plain_entry())]
        plain += [Way(f"static {d}", plain_entry(d)) for d in neighbours(self.mean) if d < self.workload.num_layers]
        exits = []
        for rule in self.config.rules:
            entry = exit_entry(self.workload, rule)
            shares = self.config.quantiles if rule is BatchRule.quantile else [None]
            exits += [Way(told(rule, share), entry, 0.5 if share is None else share) for share in shares]
        return {way.name: way for way in (*plain, *exits)}

    def engine(self, way: Way, batch: int) -> "Engine":
        costs = self.costs(batch)[0] if way.entry.rule is BatchRule.rebatch else None
        return timed_engine(
            self.workload, batch, self.config.threads, rule=way.entry.rule, costs=costs, quantile=way.share
        )

    def costs(self, batch: int) -> tuple[CostTable, Setting]:
        """Cost table and setting of an engine of this batch size: of its own, since a step of few rows finds other
        things in the processor's caches than one that was measured after many."""
        from calm.checkpoint import read_json, write_json
        from serve.measure import measure, setting_of

        if batch not in self._costs:
            engine, kept = timed_engine(self.workload, batch, self.config.threads), self.folder / f"costs-{batch}.json"
            if not kept.is_file():
                lengths = [len(self.workload.model.to_ids(each.source)) for each in self.workload.articles]
                asked = [{name for name, _ in self.workload.policies}]
                table = measure(engine, self.config.table_repeats, asked, lengths)
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(kept, json.loads(table.to_json()))
            self._costs[batch] = CostTable.from_json(json.dumps(read_json(kept))), setting_of(engine)
        return self._costs[batch]

    def simulated(self, batch: int) -> dict[str, Simulated]:
        """Every way at this batch size; of a batch that is large beside the articles, they come again.

        Raises:
            ConfigError: the table lacks an entry.
        """
        return {name: self._simulated(way, batch) for name, way in self.ways.items()}

    def _simulated(self, way: Way, batch: int) -> Simulated:
        from serve.choice import RuleChoice
        from serve.options import EngineOptions, at_once

        table, setting = self.costs(batch)
        options = EngineOptions(rule=way.entry.rule, quantile=way.share, **at_once(batch))
        rule: Rule | RuleChoice = way.rule()
        if RuleChoice.decides(options):
            rule = RuleChoice(options, setting, table, lambda asked: {})
        return SimEngine(table, setting, rule).run(self._traces(way, batch))

    def _traces(self, way: Way, batch: int) -> list[Trace]:
        answers = self.recorded[way.name if way.plain else BatchRule.own.value]
        asked = frozenset[Measure]() if way.entry.measure is None else frozenset({way.entry.measure})
        lengths = [len(self.workload.model.to_ids(each.source)) for each in self.workload.articles]
        pairs = list(zip(answers, lengths, strict=True))
        count = max(len(pairs), FILLED * batch)
        fills = way.entry.depth is None
        return [
            Trace(answer.crossing_layers, length, measures=asked, fills=fills)
            for answer, length in islice(cycle(pairs), count)
        ]


def told(rule: BatchRule, share: float | None) -> str:
    return rule.value if share is None else f"{rule.value} {share:g}"


def mean_layers(answers: "Sequence[Answer]") -> float:
    """Of the tokens: mean layer that gave them."""
    layers = [layer for answer in answers for layer in answer.emission_layers]
    return sum(layers) / len(layers)


def simulated_rows(ground: Ground, batch: int) -> list[dict[str, Any]]:
    """A record for each way, predicted."""
    found = {name: figures_of(each) for name, each in ground.simulated(batch).items()}
    return [
        {"kind": "simulated", "way": name, "role": role, **values, **ratios}
        for name, role, values, ratios in with_static(ground, found)
    ]


def figures_of(simulated: Simulated) -> dict[str, list[float]]:
    """As a round of a measurement has them."""
    tokens = sum(step.tokens for step in simulated.steps)
    encoder = sum(step.seconds.get("prefill", 0.0) for step in simulated.steps)
    return {
        "tokens_per_s": [tokens / simulated.seconds],
        "decode_tokens_per_s": [tokens / (simulated.seconds - encoder)],
        "latency_s": [simulated.inner_token_latency],
    }


def with_static(
    ground: Ground, found: Mapping[str, Mapping[str, Sequence[float]]]
) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every way and, between two static depths, the one of the exits' mean: name, role, medians and ratios to full.

    Args:
        found: by way and figure, a value of each round.

    Returns:
        ratios are medians over the rounds with their intervals (calm.metrics.median_interval).
    """
    around = [found[ground.static_name(each)] for each in neighbours(ground.mean)]
    mean = {figure: between_times(ground.mean, [each[figure] for each in around]) for figure in RATES}
    mean["latency_s"] = between(ground.mean, lambda depth: around[depth > ground.mean]["latency_s"])
    for name, rounds in {**found, BETWEEN: mean}.items():
        role = "mean depth" if name == BETWEEN else ground.ways[name].entry.role
        values = {figure: statistics.median(rounds[figure]) for figure in FIGURES}
        yield name, role, values, ratios(rounds, found[FULL])


def between_times(mean: float, around: Sequence[Sequence[float]]) -> list[float]:
    """Of rates at the whole depths around a mean, the one whose time lies between theirs, round by round."""
    return [1.0 / time for time in between(mean, lambda depth: [1.0 / rate for rate in around[depth > mean]])]


def ratios(mine: Mapping[str, Sequence[float]], full: Mapping[str, Sequence[float]]) -> dict[str, float]:
    told: dict[str, float] = {}
    for figure in FIGURES:
        each = [a / b for a, b in zip(mine[figure], full[figure], strict=True)]
        told |= with_median(f"{figure.removesuffix('_s').removesuffix('_per')}_ratio", each)
    return told
