"""Figure 2: time between tokens of every measure and batch rule, with how many sequences decode at once.

    python -m eval.latency    # the newest model under runs/, else shape small with random weights
    python -m eval.latency shape=small dtype=int8 batches=[1,8] traces=[tight,wide]
    python -m eval.throughput summary=RUN/summary.json    # Figure 1 of the same run, without measuring again

Writes summary.json, samples.parquet, traces.json and the figure.
"""

from pathlib import Path

from calm.cli import program
from calm.engine_config import ServingConfig

from .serving_figures import LATENCY
from .serving_run import run_serving


def run(config: ServingConfig, run_dir: Path) -> int:
    return run_serving(config, run_dir, LATENCY)


main = program("latency", ServingConfig, run)

if __name__ == "__main__":
    main()
