"""Figure 1: tokens a second of every measure and batch rule, beside full and static depth of the same engine.

    python -m eval.throughput    # the newest model under runs/, else shape small with random weights
    python -m eval.throughput shape=small dtype=int8 batches=[1,8] traces=[tight,wide]
    python -m eval.latency summary=RUN/summary.json    # Figure 2 of the same run, without measuring again

Writes summary.json, samples.parquet, traces.json and the figure.
"""

from pathlib import Path

from calm.cli import program
from calm.engine_config import ServingConfig

from .serving_figures import THROUGHPUT
from .serving_run import run_serving


def run(config: ServingConfig, run_dir: Path) -> int:
    return run_serving(config, run_dir, THROUGHPUT)


main = program("throughput", ServingConfig, run)

if __name__ == "__main__":
    main()
