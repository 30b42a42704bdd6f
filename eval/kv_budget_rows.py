"""Rows of eval.kv_budget: the table of expected errors, how well it foretells, and quality against layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from calm.config import Backfill
from calm.experiment_config import KvBudgetConfig
from calm.kv_budget import ErrorTable, error_table

from .trials import Row

if TYPE_CHECKING:
    from calm.models.t5 import EarlyExitT5
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

FULL, TRUE, PROJECT, BUDGET, EVERY, THRESHOLD = "full", "true", "project", "budget", "every", "threshold"


@dataclass(frozen=True)
class Exits:
    """Every token that left before the last layer; ``cosine`` and ``error`` as calm/kv_budget.py has them."""

    article: Int[np.ndarray, " exits"]
    skipped: Int[np.ndarray, " exits"]
    cosine: Float[np.ndarray, " exits"]
    error: Float[np.ndarray, " exits"]


@dataclass(frozen=True)
class Way:
    """A way of decoding; ``value`` of its budget, its number of exits or its threshold."""

    name: str
    role: str
    policy: "Policy"
    value: float | None = None
    backfill: Backfill = Backfill.project


def exits_in(
    model: "EarlyExitT5", articles: "Sequence[Example]", traces: "Sequence[DecodeTrace]", batch_size: int
) -> Exits:
    """Exits of these answers, whose keys and values were written over a cache with the answers' own exits in it."""
    import torch

    from calm.decode import layer_cosine

    from .backfill_states import at_exit, forced, relative_error

    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(articles), batch_size):
        here = slice(start, start + batch_size)
        with torch.inference_mode():
            true, ways, crossing, live = forced(model, articles[here], traces[here], [Backfill.project])
            own, last = ways[Backfill.project], model.num_layers
            error = torch.zeros(crossing.shape, dtype=torch.float64, device=crossing.device)
            for layer in range(2, last + 1):
                pairs = ((own.keys, true.keys), (own.values, true.values))
                both = sum(relative_error(mine[layer - 1], right[layer - 1]) for mine, right in pairs)
                error += torch.where(crossing < layer, both / (2 * last), 0.0)
            width = own.hiddens.shape[-1]
            after, before = (at_exit(own.hiddens, crossing - below).reshape(-1, width) for below in (0, 1))
            cosine = layer_cosine(after, before).view(crossing.shape)
            where = live & (crossing < last)
            number = torch.arange(len(live), device=live.device)[:, None].expand_as(live) + start
            picked = (number, last - crossing, cosine, error)
            parts.append(tuple(values[where].cpu().numpy() for values in picked))
    article, skipped, cosines, errors = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Exits(article, skipped, cosines.astype(np.float64), errors)


def decoded(
    config: KvBudgetConfig, model: "EarlyExitT5", articles: "Sequence[Example]", way: Way
) -> "list[DecodeTrace]":
    from calm.decode_batch import BatchDecoder

    return BatchDecoder(model, batch_size=config.batch_size, backfill=way.backfill)(articles, way.policy)


def table_rows(config: KvBudgetConfig, model: "EarlyExitT5", articles: "Sequence[Example]", plain: Way) -> list[Row]:
    """The table, a row for each number of layers skipped; ``exits`` are those that it was made from."""
    exits = exits_in(model, articles, decoded(config, model, articles, plain), config.batch_size)
    table = error_table(exits.skipped, exits.cosine, exits.error, model.num_layers, config.bins, config.least)
    counts = np.bincount(exits.skipped, minlength=model.num_layers)
    return [
        {"skipped": skipped, "edges": list(edges), "errors": list(errors), "exits": int(counts[skipped])}
        for skipped, (edges, errors) in enumerate(zip(table.edges, table.errors, strict=True), start=1)
    ]


def table_from(rows: Sequence[Row]) -> ErrorTable:
    """Of ``table_rows``."""
    edges, errors = (tuple(tuple(row[name]) for row in rows) for name in ("edges", "errors"))
    return ErrorTable(edges, errors)


def fit_row(
    config: KvBudgetConfig, model: "EarlyExitT5", articles: "Sequence[Example]", plain: Way, table: ErrorTable
) -> Row:
    """How the table foretells exits that it has not seen.

    Returns:
        ``error``, ``expected``: means over exits; ``correlation`` of both over exits; ``by_skipped``: of the error and
        a forecast by the number of layers skipped alone, to see what the cosine adds.
    """
    from calm.metrics import with_ratio

    exits = exits_in(model, articles, decoded(config, model, articles, plain), config.batch_size)
    pairs = zip(exits.skipped, exits.cosine, strict=True)
    expected = np.array([table.expected(int(skipped), float(cosine)) for skipped, cosine in pairs])
    alone = {count: float(np.mean(row)) for count, row in enumerate(table.errors, start=1)}
    counted = np.array([alone[int(count)] for count in exits.skipped])
    row: Row = {"exits": len(exits.error)}
    counts = np.bincount(exits.article, minlength=len(articles))
    for name, values in (("error", exits.error), ("expected", expected)):
        sums = np.bincount(exits.article, weights=values, minlength=len(articles))
        row |= with_ratio(name, sums, counts, config.seed, config.bootstrap)
    return row | {"correlation": correlated(exits.error, expected), "by_skipped": correlated(exits.error, counted)}


def correlated(mine: np.ndarray, other: np.ndarray) -> float | None:
    """Pearson's; None where one does not vary."""
    if len(mine) < 2 or mine.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(mine, other)[0, 1])


class Compared:
    """Answers of each way beside full depth's and those of the same exits without a budget; each decoded once."""

    def __init__(
        self, config: KvBudgetConfig, model: "EarlyExitT5", articles: "Sequence[Example]", full: Way, plain: Way
    ) -> None:
        self.config, self.model, self.articles = config, model, articles
        self.full, self.plain = full, plain
        self._done: dict[str, list[DecodeTrace]] = {}

    def of(self, way: Way) -> "list[DecodeTrace]":
        if way.name not in self._done:
            self._done[way.name] = decoded(self.config, self.model, self.articles, way)
        return self._done[way.name]

    def row(self, way: Way) -> Row:
        """Quality and depth.

        Returns:
            ``rouge_l`` to the references, ``to_full`` to full depth's answers and ``equal_rows``, each also
            ``_minus_project`` (article by article); ``layers`` of a token, and ``deep``: the share of tokens from L.
        """
        from calm.metrics import with_interval, with_ratio

        config, traces = self.config, self.of(way)
        again = {"seed": config.seed, "n": config.bootstrap}
        row: Row = {"articles": len(traces)}
        plain = self._scores(self.plain)
        for name, values in self._scores(way).items():
            row |= with_interval(name, values, **again)
            row |= with_interval(f"{name}_minus_project", values - plain[name], **again)
        tokens = np.array([len(trace.tokens) for trace in traces])
        layers = np.array([sum(trace.emission_layers) for trace in traces])
        deep = np.array([sum(layer == self.model.num_layers for layer in trace.emission_layers) for trace in traces])
        row |= with_ratio("layers", layers, tokens, **again) | with_ratio("deep", deep, tokens, **again)
        return row | {"tokens": int(tokens.sum())}

    def pairs(self, ways: Sequence[Way]) -> list[Row]:
        """Each budget beside the control and the threshold whose layers come nearest to its own.

        Returns:
            ``layers``, ``other_layers``; ``to_full_gained``, ``rouge_l_gained``: the budget's less the other's, article
            by article.
        """
        from calm.metrics import with_interval
        from calm.records import mean_layers

        rows, layers = list[Row](), {way.name: mean_layers(self.of(way)) for way in ways}
        for way in (each for each in ways if each.role == BUDGET):
            for role in (EVERY, THRESHOLD):
                others = [each for each in ways if each.role == role]
                if not others:
                    continue
                other = min(others, key=lambda each: abs(layers[each.name] - layers[way.name]))
                row: Row = {"way": way.name, "other": other.name, "role": role}
                row |= {"layers": layers[way.name], "other_layers": layers[other.name]}
                mine, theirs = self._scores(way), self._scores(other)
                for name in ("to_full", "rouge_l"):
                    gained = mine[name] - theirs[name]
                    row |= with_interval(f"{name}_gained", gained, self.config.seed, self.config.bootstrap)
                rows.append(row)
        return rows

    def _scores(self, way: Way) -> dict[str, np.ndarray]:
        from calm.metrics import rouge_l_many

        traces, full = self.of(way), self.of(self.full)
        texts, same = [t.text for t in traces], [a.tokens == b.tokens for a, b in zip(traces, full, strict=True)]
        return {
            "rouge_l": rouge_l_many(texts, [each.target for each in self.articles]),
            "to_full": np.where(same, 1.0, rouge_l_many(texts, [trace.text for trace in full])),
            "equal_rows": np.array(same, dtype=np.float64),
        }
