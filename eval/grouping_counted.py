"""Layers that steps run and tokens per second by a cost table, for each way of grouping requests.

A draw is half of the articles in an order of arrival, none twice: the spread of such halves is that of all articles
(the delete-half jackknife, Shao and Wu 1989), and every way of grouping sees the same draws. All requests of a draw
wait from its start: the server is saturated, and ``step_layers`` and ``gain`` are of the steps with all places taken
(at the end of a draw they are not). Intervals are 95 %, over the draws; what is saved over random order is paired.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from calm.config import Measure
from calm.errors import CalmError
from calm.experiment_config import GroupingConfig

from .grouping_orders import Steps, one_after_another, regrouped, windows
from .grouping_price import Prices

RANDOM, ENCODER, LENGTH, ONLINE = "random", "encoder", "length", "online"
ORACLE, STEP_ORACLE = "oracle", "step oracle"  # the true mean of the answer; the true next layer of each row
FULL, STATIC = "full", "static"
OWN, SYNC = "own", "sync"
FIXED = ("wait_requests", "steps_of_a_token", "rows_of_a_step")


@dataclass(frozen=True)
class Known:
    """A row of the table, article by article, and what is known of the articles before their tokens.

    Attributes:
        crossing: layer of each token, 0 after the answer's end.
        full: the same of full depth's answers to the same articles.
        keys: by way of grouping, what its windows are sorted by.
        sources: tokens of each source.
    """

    name: str
    num_layers: int
    measures: frozenset[Measure]
    crossing: Int[np.ndarray, "articles tokens"]
    full: Int[np.ndarray, "articles tokens"]
    keys: dict[str, Float[np.ndarray, " articles"]]
    sources: Int[np.ndarray, " articles"]

    @property
    def depth(self) -> Float[np.ndarray, " articles"]:
        """Mean crossing layer of each answer."""
        found: Float[np.ndarray, " articles"] = self.crossing.sum(axis=1) / (self.crossing > 0).sum(axis=1)
        return found

    @property
    def mean_depth(self) -> float:
        """Over all tokens."""
        return float(self.crossing.sum() / (self.crossing > 0).sum())


def rules_of(config: GroupingConfig) -> dict[str, tuple[float, bool]]:
    """Share of the rows that ends a step, and whether crossed rows keep their hidden."""
    return {OWN: (1.0, True), SYNC: (1.0, False), **{f"quantile {q:g}": (q, True) for q in config.quantiles}}


def counted(config: GroupingConfig, known: Known, prices: Callable[[], Prices], batch: int) -> list[dict[str, Any]]:
    """A record for each way of grouping, pool and rule, at one batch size; last one of static depth.

    Raises:
        CalmError: half of the articles are fewer than the smallest pool.
    """
    half = len(known.crossing) // 2
    if half < batch * min(config.pools):
        raise CalmError(
            f"{min(config.pools)} batches of {batch} need twice as many articles, got {len(known.crossing)}"
        )
    price, generator = prices(), np.random.default_rng([config.seed, batch])
    drawn: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for _ in range(config.draws):
        chosen = generator.permutation(len(known.crossing))[:half]
        full, static = at_depth(known, chosen, known.num_layers), at_depth(known, chosen, static_depth(known))
        plainly = [one_after_another(each, batch, known.num_layers) for each in (full, static)]
        base, level = (rate(price, known, chosen, steps, batch, 1.0, frozenset()) for steps in plainly)
        depth = float(static_depth(known))
        drawn.setdefault((STATIC, 1, STATIC), []).append({"step_layers": depth, "layers": depth, "gain": level / base})
        random: dict[str, dict[str, float]] = {}
        for way, pool, steps, wait in ways(config, known, chosen, batch):
            anywhere = way in (ONLINE, STEP_ORACLE)
            for rule, (share, holds) in rules_of(config).items():
                tokens_per_s = rate(
                    price, known, chosen, steps, batch, share, known.measures, holds=holds, gathered=anywhere
                )
                stop, rows = steps.stops(share), steps.rows
                found = {
                    "step_layers": float(stop[rows == batch].mean()),
                    "layers": float((stop * rows).sum() / rows.sum()),
                    "rows_of_a_step": float(rows.mean()),
                    "gain": tokens_per_s / base,
                }
                plain = random.setdefault(rule, found)  # it comes first
                found["saved"] = plain["step_layers"] - found["step_layers"]
                found["over_random"] = found["gain"] / plain["gain"]
                drawn.setdefault((way, pool, rule), []).append({**found, **wait})
    return [
        {"grouping": way, "pool": pool, "rule": rule, "requests": half, **averaged(values)}
        for (way, pool, rule), values in drawn.items()
    ]


def ways(
    config: GroupingConfig, known: Known, chosen: Int[np.ndarray, " requests"], batch: int
) -> Iterator[tuple[str, int, Steps, dict[str, float]]]:
    """Each way of grouping at each pool: its steps, and what waiting it costs. Random order first."""
    crossing = known.crossing[chosen]
    arrived = one_after_another(crossing, batch, known.num_layers)
    yield RANDOM, 1, arrived, {"wait_requests": 0.0, "later_steps": 0.0, "steps_of_a_token": 1.0}
    for pool in config.pools:
        for way, keys in (*known.keys.items(), (ORACLE, known.depth)):
            order = windows(keys[chosen], batch * pool)
            steps = one_after_another(crossing[order], batch, known.num_layers)
            begins = np.empty(len(order), dtype=np.int64)
            begins[order] = steps.first
            later = float(np.quantile(begins - arrived.first, 0.95))
            yield way, pool, steps, waited(len(chosen), batch * pool, later)
        for way, recent in ((ONLINE, config.recent), (STEP_ORACLE, None)):
            steps = regrouped(crossing, batch, pool, known.num_layers, recent)
            later = float(np.quantile(steps.first - arrived.first, 0.95))
            yield way, pool, steps, {"wait_requests": 0.0, "later_steps": later, "steps_of_a_token": float(pool)}


def waited(requests: int, window: int, later: float) -> dict[str, float]:
    """What a window costs: ``wait_requests`` that come after one until its window is complete, mean over the window;
    ``later_steps``: 95th percentile of how many steps later than in order of arrival a request first speaks, where all
    wait from the start; ``steps_of_a_token``: steps of the server in which a running row speaks once.
    """
    return {"wait_requests": (min(window, requests) - 1) / 2, "later_steps": later, "steps_of_a_token": 1.0}


def static_depth(known: Known) -> int:
    """The whole depth that is not below the mean of the exits: what a fixed depth would run instead."""
    return int(np.ceil(known.mean_depth))


def at_depth(known: Known, chosen: Int[np.ndarray, " requests"], depth: int) -> Int[np.ndarray, "requests tokens"]:
    """Full depth's answers with every token at this depth: those of a fixed depth are not recorded."""
    return np.where(known.full[chosen] > 0, depth, 0)


def rate(
    price: Prices,
    known: Known,
    chosen: Int[np.ndarray, " requests"],
    steps: Steps,
    batch: int,
    share: float,
    measures: frozenset[Measure],
    *,
    holds: bool = True,
    gathered: bool = False,
) -> float:
    """Tokens per second of the steps with all places taken; each token bears its part of encoder and admission."""
    there = steps.rows == batch
    seconds = price.steps(
        steps.counts[there], steps.stops(share)[there], measures, holds=holds, gathered=gathered
    )  # fmt: skip
    tokens = batch * int(there.sum())
    beside = price.requests(known.sources[chosen].tolist()) * tokens / int(steps.rows.sum())
    return tokens / (float(seconds.sum()) + beside)


def averaged(values: list[dict[str, float]]) -> dict[str, float]:
    """Means over the draws and, but for what a way of grouping fixes, 95 % intervals (1.96 standard deviations)."""
    found: dict[str, float] = {}
    for name in values[0]:
        numbers = np.array([each[name] for each in values])
        mean, half = float(numbers.mean()), 1.96 * float(numbers.std(ddof=1))
        if name in FIXED:
            found[name] = mean
            continue
        found |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return found
