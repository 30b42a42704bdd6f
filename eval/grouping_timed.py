"""Engines that answer articles in grouped and in random order, one after the other, beside full and static depth.

All articles wait from the start and take free places in the order they were put in, so an engine runs the steps that
eval/grouping_orders.py counts. Under the row-exact ``own`` its depths are those recorded; under ``sync`` mates change
them, and the prediction from records is on trial.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from calm.checkpoint import read_json, write_json
from calm.config import BatchRule, Measure
from calm.cost import CostTable
from calm.errors import CalmError
from calm.experiment_config import GroupingConfig

from .clocks import AGAIN, Clocked, Contender, Paired, median_ratio, paired
from .grouping_counted import ENCODER, FULL, ORACLE, OWN, RANDOM, STATIC, SYNC, Known, at_depth, static_depth
from .grouping_orders import Steps, one_after_another, windows
from .grouping_price import Prices
from .recorded import padded

if TYPE_CHECKING:
    from calm.policies import Policy
    from serve.engine import Engine
    from serve.model import ServedModel
    from serve.requests import Answer


@dataclass
class Timed:
    """Engines of the recorded model on this machine's CPU.

    Attributes:
        sources: ids of each article, in the order of the records.
        measures: sets that rows ask at once: what the cost table prices.
        folder: where cost tables are kept, so that a resumed run goes on with the same.
    """

    config: GroupingConfig
    model: "ServedModel"
    sources: Sequence[Sequence[int]]
    measures: Sequence[frozenset[Measure]]
    folder: Path
    _prices: dict[int, Prices] = field(default_factory=dict)

    def engine(self, batch: int, rule: BatchRule = BatchRule.own) -> "Engine":
        """Fills all its places before a step, encodes every source anew."""
        from serve.engine import Engine
        from serve.options import EngineOptions, at_once

        most = max(len(self.sources), batch)
        return Engine(
            self.model, EngineOptions(rule=rule, runner=self.config.runner, max_waiting=most, **at_once(batch))
        )

    def prices(self, batch: int) -> Prices:
        """Of an engine of this batch size, measured once a run: a step of few rows finds other things in the
        processor's caches than one that was measured after many."""
        import torch

        from serve.measure import measure, setting_of

        if batch not in self._prices:
            torch.set_num_threads(self.config.threads)
            engine, kept = self.engine(batch), self.folder / f"costs-{batch}.json"
            if not kept.is_file():
                if self.config.threads == 1:  # what others have of a busy machine is no price
                    engine.clock.now = time.thread_time
                lengths = [len(each) for each in self.sources]
                table = measure(engine, self.config.price_repeats, self.measures, lengths)
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(kept, json.loads(table.to_json()))
            self._prices[batch] = Prices(CostTable.from_json(json.dumps(read_json(kept))), setting_of(engine))
        return self._prices[batch]

    def compared(self, known: Known, policy: "Policy", batch: int) -> list[dict[str, Any]]:
        """A record for full depth, static depth, and each order under each rule: timed, and predicted beside.

        Raises:
            CalmError: fewer articles than are to be answered, a clock that is too coarse, or a noisy machine.
        """
        from calm.policies import Full, Static

        config = self.config
        if len(self.sources) < config.timed:
            raise CalmError(f"timed={config.timed}, but there are {len(self.sources)} articles")
        arrived = np.random.default_rng([config.seed, batch, 1]).permutation(len(self.sources))[: config.timed]
        orders, price = {RANDOM: arrived}, self.prices(batch)
        for name, keys in ((ENCODER, known.keys[ENCODER]), (ORACLE, known.depth)):
            orders[name] = arrived[windows(keys[arrived], batch * min(config.pools))]
        depth = static_depth(known)
        runs = [
            Run(self, known, batch, FULL, RANDOM, arrived, Full()),
            Run(self, known, batch, STATIC, RANDOM, arrived, Static(depth)),
            *(Run(self, known, batch, r, name, order, policy) for r in (OWN, SYNC) for name, order in orders.items()),
        ]
        contenders = [Contender(run.name, run) for run in runs]
        found = paired(
            contenders, 1, config.timed, config.repeats, config.warmups, allow_noisy=config.allow_noisy
        )  # fmt: skip
        plain = {run.rule: run for run in runs if run.grouping == RANDOM}
        return [run.record(found, plain[FULL], plain[run.rule], price) for run in runs]


@dataclass
class Run:
    """One contender: an engine of its own, called with how many articles it shall answer."""

    timed: Timed
    known: Known
    batch: int
    rule: str
    grouping: str
    order: Int[np.ndarray, " requests"]
    policy: "Policy"

    def __post_init__(self) -> None:
        self.engine = self.timed.engine(self.batch, BatchRule.sync if self.rule == SYNC else BatchRule.own)
        self.answers: list[Answer] = []

    @property
    def name(self) -> str:
        return f"{self.rule} {self.grouping}"

    def __call__(self, articles: int) -> None:
        self.engine.clock.history.clear()
        sources = [self.timed.sources[number] for number in self.order[:articles]]
        self.answers = self.engine.generate(sources, policy=self.policy)
        failed = next((answer for answer in self.answers if answer.error), None)
        if failed is not None:
            raise CalmError(f"{failed.id}: {failed.error}")

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def expected(self, price: Prices) -> tuple[Steps, float]:
        """Steps from the records, and tokens per second by the cost table.

        No record has the answers of the fixed depth: their lengths are those that were timed.
        """
        known, ready = self.known, self.rule in (FULL, STATIC)
        crossing = known.crossing[self.order]
        if self.rule == FULL:
            crossing = at_depth(known, self.order, known.num_layers)
        if self.rule == STATIC:
            crossing = padded([[static_depth(known)] * len(answer.tokens) for answer in self.answers])
        steps = one_after_another(crossing, self.batch, known.num_layers)
        asked = frozenset() if ready else known.measures
        seconds = float(price.steps(steps.counts, steps.stops(1.0), asked, holds=self.rule != SYNC).sum())
        return steps, float(steps.rows.sum()) / (seconds + price.requests(known.sources[self.order].tolist()))

    def over(self, other: "Run", found: Paired) -> tuple[float, float, float]:
        """How many times the other's tokens per second: median, lowest and highest of the rounds.

        Of calls from the first source to the last answer.
        """
        share = self.tokens / other.tokens
        before, after = (found.seconds(run.name, Clocked.call) for run in (other, self))
        rounds = [share * a / b for a, b in zip(before, after, strict=True)]
        return share * median_ratio(before, after), min(rounds), max(rounds)

    def record(self, found: Paired, full: "Run", random: "Run", price: Prices) -> dict[str, Any]:
        """What was timed with its samples, and what was predicted.

        ``gain`` is tokens per second over full depth's, ``over_random`` over the same rule's in random order;
        ``as_recorded`` the share of answers whose tokens crossed where the records say. Layers are of all steps, those
        at the end too, where rows are few.
        """
        (steps, expected), (_, expected_full) = self.expected(price), full.expected(price)
        _, expected_random = random.expected(price)
        ran = [len(step.layers) for step in self.engine.clock.history if step.rows]
        same = [
            tuple(answer.crossing_layers) == tuple(row[row > 0].tolist())
            for answer, row in zip(self.answers, self.known.crossing[self.order], strict=True)
        ]
        told: dict[str, float] = {}
        for name, other in (("gain", full), ("over_random", random)):
            told[name], told[f"{name}_low"], told[f"{name}_high"] = self.over(other, found)
        return {
            "rule": self.rule, "grouping": self.grouping,
            "pool": 1 if self.grouping == RANDOM else self.timed.config.pools[0],
            "requests": len(self.order), "tokens": self.tokens, **told, "predicted_gain": expected / expected_full,
            "predicted_over_random": expected / expected_random,
            "step_layers": float(np.mean(ran)), "predicted_step_layers": float(steps.stops(1.0).mean()),
            "as_recorded": None if self.rule in (FULL, STATIC) else float(np.mean(same)),
            "seconds": found.seconds(self.name, Clocked.call),
            "full_again": found.seconds(full.name + AGAIN, Clocked.call),
            "runner": self.engine.runner_name.value, "noisy": found.noise.noisy, "foreign_cpu": found.noise.foreign,
        }  # fmt: skip
