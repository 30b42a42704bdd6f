"""What batching leaves of early exit: throughput and time between tokens under every batch rule against batch size.

    python -m eval.batching checkpoint=results/debian_tiny/model

A trained folder answers articles to their ends at its certified threshold, as many at once as the batch has rows, under
every rule and beside full depth and static depth of the exits' mean (between two whole depths, interpolated); all ways
of a batch size take turns. The same and larger sizes are predicted from cost tables that are measured in the same run
(eval/batching_simulated.py). Throughput is all tokens by wall clock, encoder included, and once more by the engine's
own clock without the encoder; time between tokens is the sum over sequences of (end - first token) by all tokens (arXiv
2407.20272, section 5). Ratios are medians over the rounds with their range. Writes summary.json, rows.parquet, the cost
tables and the figure.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.experiment_config import BatchingConfig

from .common import Stamp, asked_of, finish, say
from .experiment import UNFINISHED, draw, keep_rows, say_columns
from .trials import Ledger, Trial

if TYPE_CHECKING:
    from .batching_simulated import Ground

# what does not change a batch size's numbers
UNIMPORTANT = ("checkpoint", "batches", "simulated", "attempts")
SHOWN = ("batch", "way", "tokens_per_s", "tokens_ratio", "decode_tokens_ratio", "latency_ratio", "kind")


def run(config: BatchingConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.batching", config)
    from .batching_simulated import Ground
    from .batching_told import paper_bars, prediction
    from .timed_folder import about_timed, clock_name, open_timed

    workload = open_timed(config)
    told = about_timed(workload)
    asked = {name: value for name, value in told.items() if name not in ("checkpoint", "notes")}
    ledger = Ledger(run_dir, {**asked_of(config, UNIMPORTANT), **asked})
    ground = Ground(config, workload, ledger.folder)
    found = ledger.run(list(trials(ground)), "batching", say)
    rows = keep_rows(found, run_dir)
    say_columns(rows, SHOWN, digits=2)
    summary = {
        **stamp.values(),
        **told,
        "num_layers": workload.num_layers,
        "mean_layers": ground.mean,
        "clock": clock_name(config.threads),  # of the cost tables and of what leaves the encoder out
        "noisy": any(row["noisy"] for row in rows if row["kind"] == "measured"),
        "rows": rows,
        "prediction": prediction(rows),
        "paper": paper_bars(told["measure"]),
        "failed": found.failed,
    }
    summary["figures"] = draw("batching", summary, run_dir)
    finish(summary, run_dir)
    return UNFINISHED if found.failed else 0


def trials(ground: "Ground") -> Iterator[Trial]:
    """One for each batch size, measured and simulated."""
    from .batching_simulated import simulated_rows

    for batch in ground.config.batches:
        yield Trial({"batch": batch, "by": "clock"}, lambda b=batch: measured_rows(ground, b))  # type: ignore[misc]
    for batch in ground.config.simulated:
        yield Trial({"batch": batch, "by": "table"}, lambda b=batch: simulated_rows(ground, b))  # type: ignore[misc]


def measured_rows(ground: "Ground", batch: int) -> list[dict[str, Any]]:
    """A record for each way, of rounds in which all of them took turns.

    Raises:
        CalmError: the machine is noisy and that is not allowed, or an answer failed.
    """
    from .batching_simulated import FIGURES, with_static
    from .timed_folder import in_turns, turns_of

    ways = {name: turns_of(way.entry, ground.engine(way, batch), ground.workload) for name, way in ground.ways.items()}
    timed = in_turns(ways, ground.config)
    found = {
        name: {
            **turns.rates,
            "latency_s": [each.session.inner_token_latency for each in turns.rounds],
        }
        for name, turns in ways.items()
    }
    rows = []
    for name, role, values, ratios in with_static(ground, found):
        row: dict[str, Any] = {"kind": "measured", "way": name, "role": role, **values, **ratios}
        if name in ways:
            last = ways[name].rounds[-1]
            row |= {"tokens": last.session.tokens, "layers": last.layers, "concurrency": last.session.concurrency}
            row |= {"executed": last.row_layers / last.session.tokens}
            row |= {f"{figure}_rounds": found[name][figure] for figure in FIGURES}
        rows.append({**row, "noisy": timed.noise.noisy, "foreign_cpu": timed.noise.foreign})
    return rows


main = program("batching", BatchingConfig, run)

if __name__ == "__main__":
    main()
