"""Layers that steps run and tokens per second by a cost table, for each way of grouping requests.

A draw is half of the articles in an order of arrival, none twice: the spread of such halves is that of all articles
(the delete-half jackknife, Shao and Wu 1989), and every way of grouping sees the same draws. All requests of a draw
wait from its start: the server is saturated. Intervals are 95 %, over the draws; gains over random order are paired.
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
        base = rate(price, known, chosen, full, batch)
        level = rate(price, known, chosen, static, batch)
        drawn.setdefault((STATIC, 1, STATIC), []).append(
            {"step_layers": static_depth(known), "layers": static_depth(known), "gain": level / base}
        )
        plain: dict[str, dict[str, float]] = {}
        for way, pool, steps, wait in ways(config, known, chosen, batch):
            for rule, (share, holds) in rules_of(config).items():
                stop = steps.stops(share)
                seconds = price.steps(
                    steps.counts, stop, known.measures, holds=holds, gathered=way in (ONLINE, STEP_ORACLE)
                )
                total = float(seconds.sum()) + price.requests(known.sources[chosen].tolist())
                found = {
                    "step_layers": float(stop.mean()),
                    "layers": float((stop * steps.rows).sum() / steps.rows.sum()),
                    "rows_of_a_step": float(steps.rows.mean()),
                    "gain": float(steps.rows.sum()) / total / base,
                }
                plain.setdefault(rule, found)  # random order comes first
                found["saved"] = plain[rule]["step_layers"] - found["step_layers"]
                found["over_random"] = found["gain"] / plain[rule]["gain"]
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


def rate(price: Prices, known: Known, chosen: Int[np.ndarray, " requests"], crossing: np.ndarray, batch: int) -> float:
    """Tokens per second of depths that are given."""
    steps = one_after_another(crossing, batch, known.num_layers)
    seconds = float(price.steps(steps.counts, steps.stops(1.0), frozenset(), holds=True).sum())
    return float(steps.rows.sum()) / (seconds + price.requests(known.sources[chosen].tolist()))


def averaged(values: list[dict[str, float]]) -> dict[str, float]:
    """Means over the draws and 95 % intervals (1.96 standard deviations of the draws)."""
    found: dict[str, float] = {}
    for name in values[0]:
        numbers = np.array([each[name] for each in values])
        mean, half = float(numbers.mean()), 1.96 * float(numbers.std(ddof=1))
        found |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return found
