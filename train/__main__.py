"""Train a T5 whose decoder layers all speak, its exit classifier, and certify exit thresholds.

python -m train +model=tiny
python -m train +model=base data=cnn_dailymail finetune.steps=300000 finetune.batch_size=4
python -m train resume=runs/train/<time>

Leaves with 0 when done, 1 after an error, 130 after SIGINT and 143 after SIGTERM, both with a checkpoint saved.
"""

from pathlib import Path

from calm.cli import job_overrides, program
from calm.config import TrainConfig

from .launch import launch, process_count


def run(config: TrainConfig, run_dir: Path) -> int:
    """Start one process per core where that is fastest, else train here."""
    count = process_count(config)
    if count > 1:
        print(f"starting {count} processes in {run_dir}", flush=True)  # they need seconds to import torch
        return launch(count, job_overrides(), run_dir)
    from .run import train  # torch and transformers take seconds: the parent needs neither

    return train(config, run_dir)


main = program("train", TrainConfig, run)

if __name__ == "__main__":
    main()
