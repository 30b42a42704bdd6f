"""Whether an answer depends on the batch it is decoded in, and what that does to a certified risk.

    python -m eval.invariance checkpoint=results/debian_tiny/model

The same articles in batches of several sizes, in the order given and shuffled (so with other mates), under each batch
rule, in each dtype and by each runner that can be had. Row-exact rules (``own``, ``compact``, ``rebatch``) promise
what a row answers alone; ``sync``, ``quantile`` and ``lockstep`` let mates decide. Answers are held to those of rule
``own`` at batch 1 of the same dtype and runner. In fp32 a row-exact rule may change one only at a near tie
(calm/near_ties.py). Risk is the mean loss against full depth of the same dtype and runner (CALM section 4.1), at the
threshold certified for that arithmetic, or else at fp32's, and then without a certificate. Intervals are over articles:
exact binomial ones of shares of answers, bootstrap of all else. Nothing is timed. Writes summary.json, rows.parquet
and the figure.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calm.cli import program
from calm.config import BatchRule, RunnerName
from calm.device import choose_device
from calm.errors import DataError
from calm.experiment_config import InvarianceConfig

from .changed_answers import is_row_exact, near_ties, parting
from .common import Stamp, articles_of, asked_of, choose_model, finish, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .invariance_ways import Decoder, Way, ways_of
from .trials import Ledger, Row, Trial

ALONE = ("given",)
UNIMPORTANT = ("checkpoint", "rules", "batches", "orders", "eager_orders")  # to a trial's numbers
SHOWN = ("dtype", "runner", "rule", "batch", "order", "answers_changed", "unexplained", "changed", "tokens_changed",
         "risk", "risk_low", "risk_high", "minus_own", "minus_own_low", "minus_own_high")  # fmt: skip


def run(config: InvarianceConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.invariance", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.calibration import ModelIdentity
    from calm.calibration.identity import code_version, hash_rows
    from calm.models.folder import load

    model = load(folder, device)
    identity = ModelIdentity.of(model, folder, dtype="float32")
    ways, left_out = ways_of(config, folder, device, identity)
    corpus, articles = articles_of(config.data, model, config.n)
    if not articles:
        raise DataError(f"the test split of {corpus} is empty")
    say(f"corpus: {corpus}, {len(articles)} articles of the test split, one of each family")
    for way in ways:
        certificate = "certified" if way.certified else "not certified in this arithmetic"
        say(f"{way.name}: {way.artifact} at threshold {way.threshold}, {certificate}")
    for line in left_out:
        say(f"left out: {line}")
    told = {
        "model": identity.to_json(),
        "ways": [way.told() for way in ways],
        "rows_hash": hash_rows(articles),
        "code": code_version(),
    }
    decoder = Decoder(config, folder, device, model, articles)
    asked = {**asked_of(config, UNIMPORTANT), **told, "device": device}
    found = Ledger(run_dir, asked).run(list(trials(config, ways, decoder)), "invariance", say)
    rows = keep_rows(found, run_dir)
    say_columns(rows, SHOWN, digits=4, left=3)
    summary = {
        **stamp.values(),
        "checkpoint": str(folder),
        "corpus": corpus,
        "articles": len(articles),
        **told,
        "left_out": left_out,
        "tolerance": config.tolerance,
        "quantile": config.quantile,
        "unexplained": sum(row["unexplained"] or 0 for row in rows),
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("invariance", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def trials(config: InvarianceConfig, ways: Sequence[Way], decoder: Decoder) -> Iterator[Trial]:
    """Each way, rule, batch and order of arrival; a row alone has no mates, whoever came before it.

    Left out is what the graph runner does not offer: it parks nobody.
    """
    for way in ways:
        orders = config.eager_orders if way.beside else config.orders
        for rule, batch in itertools.product(config.rules, config.batches):
            if (way.runner, rule) == (RunnerName.graph, BatchRule.rebatch):
                continue
            for order in ALONE if batch == 1 else orders:
                values = {
                    "dtype": way.dtype,
                    "runner": way.runner.value,
                    "rule": rule.value,
                    "batch": batch,
                    "order": order,
                }
                yield Trial(
                    values,
                    lambda w=way, r=rule, b=batch, o=order: [measured(config, decoder, w, r, b, o)],  # type: ignore[misc]
                )


def measured(config: InvarianceConfig, decoder: Decoder, way: Way, rule: BatchRule, batch: int, order: str) -> Row:
    """How these answers differ from the rows' own, and what they lose.

    Returns:
        ``answers_changed`` of the articles have other tokens, ``changed`` is their share; ``tokens_changed``: share of
        the tokens of the rows alone that are not in their place; ``parted``: answers with other tokens or crossing
        layers, of which ``near_ties`` may and ``unexplained`` may not differ (null unless fp32 and row-exact);
        ``risk``; ``minus_own``: it less the risk of the rows alone, article by article; ``layers``: that gave a token.
    """
    from calm.metrics import with_interval, with_ratio
    from calm.records import mean_layers

    alone = decoder.alone(way)
    traces = decoder.traces(way, rule, batch, order)
    losses, parted = alone.loss(traces), parting(traces, alone.traces)
    excused = unexplained = None
    if way.dtype == "fp32" and is_row_exact(rule):
        excused = near_ties(decoder.model, decoder.articles, way.policy, parted)
        unexplained = len(parted) - excused
    pairs = [(mine.tokens, theirs.tokens) for mine, theirs in zip(traces, alone.traces, strict=True)]
    gone = np.array([misplaced(*pair) for pair in pairs])
    changed = sum(tuple(mine) != tuple(theirs) for mine, theirs in pairs)
    again: dict[str, Any] = {"seed": config.seed, "n": config.bootstrap}
    return {
        "row_exact": is_row_exact(rule),
        "certified": way.certified and is_row_exact(rule),
        "articles": len(traces),
        "answers_changed": changed,
        **share("changed", changed, len(traces)),
        **with_ratio("tokens_changed", gone, np.array([len(theirs) for _, theirs in pairs]), **again),
        "parted": len(parted),
        "near_ties": excused,
        "unexplained": unexplained,
        **with_interval("risk", losses, **again),
        **with_interval("minus_own", losses - alone.losses, **again),
        "layers": mean_layers(traces),
    }


def misplaced(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """How many of their tokens are not in their place in mine."""
    return sum(number >= len(mine) or mine[number] != token for number, token in enumerate(theirs))


def share(name: str, hits: int, of: int) -> dict[str, float]:
    """Hits among so many, with the exact 95 % interval (Clopper and Pearson), which no hit leaves wider than 0."""
    from scipy.stats import binomtest

    ends = binomtest(hits, of).proportion_ci(0.95, "exact")
    return {name: hits / of, f"{name}_low": float(ends.low), f"{name}_high": float(ends.high)}


main = program("invariance", InvarianceConfig, run)

if __name__ == "__main__":
    main()
