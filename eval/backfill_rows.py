"""Rows of eval.backfill: quality and work of each way of filling skipped layers, errors of their keys and values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calm.config import Backfill
from calm.errors import CalmError
from calm.experiment_config import BackfillConfig

from .trials import Row

if TYPE_CHECKING:
    import pandas as pd

    from calm.models.base import DecoderSpec
    from calm.models.t5 import EarlyExitT5
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

FULL = "full"


class Answers:
    """Answers of the same articles, each variant decoded once, when it is asked for first."""

    def __init__(self, model: "EarlyExitT5", articles: "Sequence[Example]", policy: "Policy", batch_size: int) -> None:
        self.model, self.articles, self.policy, self.batch_size = model, articles, policy, batch_size
        self._done: dict[str, list[DecodeTrace]] = {}

    def of(self, variant: str) -> "list[DecodeTrace]":
        """``full``, or a Backfill's value."""
        from calm.decode_batch import BatchDecoder
        from calm.policies import Full

        if variant not in self._done:
            backfill = Backfill.project if variant == FULL else Backfill(variant)
            decode = BatchDecoder(self.model, batch_size=self.batch_size, backfill=backfill)
            self._done[variant] = decode(self.articles, Full() if variant == FULL else self.policy)
        return self._done[variant]


def answered(config: BackfillConfig, answers: Answers, variant: str) -> list[Row]:
    """Quality, depth and work of one variant, and how it agrees with full depth at each position."""
    from calm.metrics import rouge_l_many
    from calm.models.t5 import export_spec
    from calm.records import mean_layers

    def scores(name: str) -> dict[str, np.ndarray]:
        traces = answers.of(name)
        texts, same = [t.text for t in traces], [a.tokens == b.tokens for a, b in zip(traces, full, strict=True)]
        near = rouge_l_many(texts, [trace.text for trace in full])
        return {
            "rouge_l": rouge_l_many(texts, [each.target for each in answers.articles]),
            "to_full": np.where(same, 1.0, near),  # equal answers are equal also where ROUGE knows no word of them
            "equal_rows": np.array(same, dtype=np.float64),
        }

    full = answers.of(FULL)
    mine, ceiling = scores(variant), scores(Backfill.true.value)
    traces, layers = answers.of(variant), answers.model.num_layers
    row: Row = {"kind": "quality", "articles": len(traces), "tokens": sum(len(trace.tokens) for trace in traces)}
    for name, values in mine.items():
        row |= averaged(name, values, config)
        row |= averaged(f"{name}_minus_true", values - ceiling[name], config)  # article by article
    depth = mean_layers(traces)
    row |= {"layers": depth, "layers_skipped": 1 - depth / layers}
    row |= work(export_spec(answers.model), variant, depth, *_lengths(answers))
    return [row] if variant == FULL else [row, *positions(config, traces, full)]


def positions(config: BackfillConfig, traces: "Sequence[DecodeTrace]", full: "Sequence[DecodeTrace]") -> list[Row]:
    """At each position of full depth's answers, EOS included: shares of the articles that have it.

    ``equal``: the token is full depth's; ``prefix``: so are all before it; ``next``: of those where all before are,
    the share where this one is too. An answer that has ended is equal nowhere.
    """
    rows: list[Row] = []
    for t in range(max(len(trace.tokens) for trace in full)):
        pairs = [(a.tokens, b.tokens) for a, b in zip(traces, full, strict=True) if len(b.tokens) > t]
        equal = np.array([a[t : t + 1] == b[t : t + 1] for a, b in pairs], dtype=np.float64)
        before = np.array([a[:t] == b[:t] for a, b in pairs])
        if len(pairs) < config.least:
            break
        row: Row = {"kind": "position", "position": t + 1, "articles": len(pairs)}
        row |= averaged("equal", equal, config) | averaged("prefix", equal * before, config)
        if before.sum() >= config.least:
            row |= averaged("next", equal[before], config)
        rows.append(row)
    return rows


def work(spec: "DecoderSpec", variant: str, depth: float, keys: int, source: int) -> Row:
    """What filling one layer for one token costs, counted (calm/cost.py): nothing for copies and holes.

    Writing keys and values is not counted; every way but ``mask`` does it.

    Returns:
        ``fill_macs``; ``fill_weight_bytes`` (fp32, read once a batch) and ``fill_row_bytes`` (of K and V read, for
        each row); ``fill_of_a_layer``: its multiply-accumulates by a layer's; ``layers_with_fill``: mean layers of a
        token, those filled counted by that share.
    """
    from calm.cost import Work, backfill_work, layer_work

    layer = layer_work(spec, keys, source)
    cost = {Backfill.project.value: backfill_work(spec), Backfill.true.value: layer}.get(variant, Work(0, 0))
    share = cost.macs / layer.macs
    return {
        "layer_macs": layer.macs,
        "fill_macs": cost.macs,
        "fill_weight_bytes": cost.weight_bytes,
        "fill_row_bytes": cost.row_bytes,
        "fill_of_a_layer": share,
        "layers_with_fill": depth + share * (spec.num_layers - depth),
        "mean_keys": keys,
        "mean_source": source,
    }


def _lengths(answers: Answers) -> tuple[int, int]:
    """Mean positions that a token of full depth's answers reads, and mean tokens of a source, rounded."""
    from calm.data.text import encode_source

    model = answers.model
    read = [t + 1 for trace in answers.of(FULL) for t in range(len(trace.tokens))]
    sources = [len(encode_source(model.tokenizer, each.source, model.settings)) for each in answers.articles]
    return round(float(np.mean(read))), round(float(np.mean(sources)))


def states(config: BackfillConfig, answers: Answers) -> list[Row]:
    """Errors by layers skipped, exit and position, and cosines by layer: means over articles of an article's mean.

    Tokens and exit layers are those of the answers under ``project``, for every variant.
    """
    from .backfill_states import measure_states

    traces = answers.of(Backfill.project.value)
    errors, cosines = measure_states(answers.model, answers.articles, traces, config.batch_size)
    if errors.empty:
        raise CalmError("no token of these articles left before the last layer, so nothing was backfilled")
    rows = grouped(config, errors, "error", ["variant", "cache", "skipped"], ["key", "value", "cosine"])
    by_exit = errors.assign(exit=errors["layer"] - errors["skipped"])  # after layer 1 own and true states are the same
    rows += grouped(config, by_exit, "error_by_exit", ["variant", "cache", "exit", "skipped"], ["key", "value"])
    rows += grouped(config, errors, "error_by_position", ["variant", "cache", "position"], ["key", "value"])
    rows += grouped(config, cosines, "hidden", ["layer"], ["previous", "last", "other"])
    above = cosines[cosines["above_exit"]]
    return rows + grouped(config, above, "hidden_above_exit", ["layer"], ["previous", "last", "other"])


def grouped(config: BackfillConfig, df: "pd.DataFrame", kind: str, by: list[str], names: list[str]) -> list[Row]:
    """A row for each group that enough articles are in."""
    rows: list[Row] = []
    for values, part in df.groupby(by, sort=True):
        mine = part.groupby("article")[names].mean().dropna()
        if len(mine) < config.least:
            continue
        row: Row = {"kind": kind, "articles": len(mine), "tokens": len(part)}
        row |= {name: value if isinstance(value, str) else int(value) for name, value in zip(by, values, strict=True)}
        for name in names:
            row |= averaged(name, mine[name].to_numpy(), config)
        rows.append(row)
    return rows


def averaged(name: str, values: np.ndarray, config: BackfillConfig) -> Row:
    """Mean over articles and its 95 % interval."""
    from calm.metrics import with_interval

    return dict(with_interval(name, values, config.seed, config.bootstrap))
