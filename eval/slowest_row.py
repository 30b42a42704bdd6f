"""How long a batch waits for its slowest row, from recorded answers: nothing is decoded.

    python -m eval.slowest_row records=results/debian_tiny

Batches of articles are drawn, their rows begin together, and nobody takes the place of a row that has ended. At each
position the rows that still run stop where the rule says: ``sync`` where the last one crosses (Algorithm 1 of arXiv
2407.20272), ``quantile`` where a share of them has crossed; ``own`` is each row's own crossing, which the row-exact
rules keep. Mixtures are of hard rows (the half of the articles whose tokens cross latest) and easy ones. Intervals are
over the draws. At a few batch sizes the engine decodes ``sync`` and ``lockstep`` (eval/slowest_row_decoded.py).
Writes summary.json, rows.parquet and the figure.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from calm.cli import program
from calm.errors import CalmError
from calm.experiment_config import SlowestRowConfig

from .common import Stamp, finish, plain, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .recorded import Recorded, read_records
from .trials import Ledger, Trial

OWN, SYNC = "own", "sync"
SHOWN = ("row", "batch", "rule", "decoded", "layers", "stops_early", "involuntary")


def run(config: SlowestRowConfig, run_dir: Path) -> int:
    stamp, recorded = Stamp("eval.slowest_row", config), read_records(config.records)
    asked = {**plain(config), "records": recorded.summary["started"]}
    todo = [*trials(config, recorded), *decoded_trials(config, recorded)]
    found = Ledger(run_dir, asked).run(todo, "slowest row", say)
    rows = keep_rows(found, run_dir)
    say_columns([row for row in rows if row["hard_share"] is None], SHOWN, digits=3)
    summary = {
        **stamp.values(),
        "records": str(recorded.folder),
        "num_layers": recorded.num_layers,
        "rows": rows,
        "failed": found.failed,
    }
    summary["figures"] = draw("slowest_row", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def trials(config: SlowestRowConfig, recorded: Recorded) -> Iterator[Trial]:
    """A row of the table at a batch size, plain and mixed.

    Raises:
        ConfigError: a row that the table has not, or none is certified.
    """
    for name in recorded.chosen(config.rows):
        mixed = [(batch, share) for batch in config.mixed_batches for share in config.hard_shares]
        for batch, share in [*((batch, None) for batch in config.batches), *mixed]:
            values = {"row": name, "batch": batch, "hard_share": share}
            yield Trial(values, lambda n=name, b=batch, s=share: waiting(config, recorded, n, b, s))  # type: ignore[misc]


def decoded_trials(config: SlowestRowConfig, recorded: Recorded) -> Iterator[Trial]:
    """The rules under which rows wait, decoded; none where the recorded model is not there."""
    from .slowest_row_decoded import RULES, Decoded

    if not config.decoded:
        return
    if recorded.model_folder is None:
        say(f"the model of {recorded.folder} is not there, so no batch is decoded")
        return
    decoded = Decoded(config, recorded)
    for name in recorded.chosen(config.rows):
        for batch in config.decoded:
            for rule in RULES:
                values = {"row": name, "batch": batch, "hard_share": None}
                measure = partial(decoded.row, name, batch, rule)
                yield Trial(values, lambda m=measure: [m()], f"decoded {name} {batch} {rule.value}")  # type: ignore[misc]


def waiting(
    config: SlowestRowConfig, recorded: Recorded, name: str, batch: int, hard_share: float | None
) -> list[dict[str, Any]]:
    """A record for each rule.

    Raises:
        CalmError: there are fewer articles than a batch has rows.
    """
    crossing = recorded.crossing[name]
    draw = np.random.default_rng([config.seed, batch, round(1000 * (hard_share or 0)), hard_share is not None])
    groups = drawn(crossing, batch, hard_share, config.draws, draw)
    rules = {OWN: None, SYNC: 1.0, **{f"quantile {share:g}": share for share in config.quantiles}}
    drawn_groups = crossing[groups]
    return [
        {"rule": rule, "decoded": False, **stopping(drawn_groups, share, recorded.num_layers)}
        for rule, share in rules.items()
    ]


def drawn(
    crossing: Int[np.ndarray, "articles tokens"],
    batch: int,
    hard_share: float | None,
    draws: int,
    generator: np.random.Generator,
) -> Int[np.ndarray, "draws batch"]:
    """Articles of each batch, no article twice in one."""
    depth = crossing.sum(axis=1) / np.maximum(1, (crossing > 0).sum(axis=1))
    order = np.argsort(depth, kind="stable")
    pools, counts = [order], [batch]
    if hard_share is not None:
        half = len(order) // 2
        hard = math.floor(hard_share * batch + 0.5)
        pools, counts = [order[:half], order[half:]], [batch - hard, hard]
    for pool, count in zip(pools, counts, strict=True):
        if count > len(pool):
            raise CalmError(f"a batch of {batch} needs {count} articles of {len(pool)}")
    return np.stack(
        [
            np.concatenate(
                [generator.choice(pool, count, replace=False) for pool, count in zip(pools, counts, strict=True)]
            )
            for _ in range(draws)
        ]
    )


def stopping(crossing: Int[np.ndarray, "draws batch tokens"], share: float | None, num_layers: int) -> dict[str, float]:
    """Means over tokens of where they stop, and their 95 % intervals over the draws.

    Returns:
        ``layers``: that a token runs; ``stops_early``: share of the tokens whose step ends below the last layer;
        ``involuntary``: share of the tokens that speak before they have crossed.
    """
    live = crossing > 0
    if share is None:
        stop = crossing
    else:
        ahead = np.sort(np.where(live, crossing, num_layers + 1), axis=1)
        wanted = np.ceil(share * live.sum(axis=1)).astype(np.int64) - 1
        stop = np.take_along_axis(ahead, np.maximum(wanted, 0)[:, None, :], axis=1)
        stop = np.broadcast_to(stop, crossing.shape)
    tokens = live.sum(axis=(1, 2))
    found: dict[str, float] = {}
    for name, values in (
        ("layers", stop),
        ("stops_early", stop < num_layers),
        ("involuntary", crossing > stop),
    ):
        sums = np.where(live, values, 0).sum(axis=(1, 2))
        mean, low, high = interval(sums / tokens, tokens)
        found |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return found


def interval(values: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Mean of all tokens and its 95 % interval, of values of draws that have so many tokens each."""
    mean = float((values * weights).sum() / weights.sum())
    half = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, mean - half, mean + half


main = program("slowest_row", SlowestRowConfig, run)

if __name__ == "__main__":
    main()
