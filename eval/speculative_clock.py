"""Drafts on the clock: beside full and static depth and certified exits of the same engine, all in turns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm.drafting import Draft
from calm.experiment_config import SpeculativeConfig

from .shallow_ways import FULL, STATIC, engine_of, exits
from .speculative_simulated import draft_values
from .trials import Row

if TYPE_CHECKING:
    from calm.policies import Policy
    from calm.records import Example
    from serve.model import ServedModel

DRAFT = "draft"


def timed_at(
    config: SpeculativeConfig,
    dtype: str,
    model: "ServedModel",
    drafts: Sequence[Draft],
    articles: "Sequence[Example]",
    batch: int,
) -> list[Row]:
    """Every way in turn over the first articles, to their ends, on engines of one kind.

    Returns:
        ``tokens_per_s`` (all included) and ``decode_tokens_per_s`` (the engine's own clock, without the encoder) of
        every round; ``tokens_ratio`` and ``decode_tokens_ratio``: medians of these by full depth's, with intervals.

    Raises:
        CalmError: the machine stays busy through all attempts and that is not allowed.
    """
    from .timed_folder import Turns, in_turns, own_clock, rate_ratios

    first = articles[: config.timed]
    engine = own_clock(engine_of(model, config.rule, dtype, batch, len(first)), config.threads)
    sources = [model.to_ids(each.source) for each in first]
    turns, about = dict[str, Turns](), dict[str, Row]()
    for name, role, policy, values in plain_ways(config, dtype, model):
        turns[name] = Turns(engine, sources, policy)
        about[name] = {"role": role, **values}
    for draft in drafts:
        values = draft_values(draft)
        turns[values["way"]] = Turns(engine, sources, None, draft)
        about[values["way"]] = {"role": DRAFT, **values}
    noise, rows = in_turns(turns, config).noise, list[Row]()
    for name, each in turns.items():
        row = {"way": name, **about[name], "runner": engine.runner_name.value}
        row |= {"noisy": noise.noisy, "foreign_cpu": noise.foreign, **each.rates}
        row |= {"layers": each.rounds[-1].layers, **rate_ratios(each.rates, turns[FULL].rates)}
        rows.append(row)
    return rows


def plain_ways(config: SpeculativeConfig, dtype: str, model: "ServedModel") -> "list[tuple[str, str, Policy, Row]]":
    """Full depth first, static depths, exits at their certified thresholds; name, role, policy and columns of each."""
    from calm.policies import Full, Static

    ways: list[tuple[str, str, Policy, Row]] = [(FULL, FULL, Full(), {})]
    for depth in config.static or [max(1, model.spec.num_layers // 2)]:
        ways.append((f"static {depth}", STATIC, Static(depth), {"depth": depth}))
    for measure in config.measures:
        for way in exits(model, measure, dtype, config.tolerance, points=0):
            ways.append((f"exit {measure.value}", way.role, way.policy, way.values()))
    return ways
