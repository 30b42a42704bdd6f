"""A training run small enough for a test: a T5 of a few thousand parameters on a few hundred generated rows.

Runs of several processes, and runs that are killed, go through a fork server that has imported everything once.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from calm.config import (
    DataConfig,
    Device,
    FinetuneConfig,
    ModelConfig,
    Precision,
    ShapeConfig,
    SplitConfig,
    Stage,
    TrackingConfig,
    TrackingMode,
    TrainConfig,
)
from calm.tracking import read_metrics

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.train.tiny", "train.run"])
TIMEOUT_S = 120.0


def tiny_config(**changes: Any) -> TrainConfig:
    """Settings of a run of 6 steps; ``finetune__lr=1`` changes ``finetune.lr``."""
    shape = ShapeConfig(
        vocab_size=100, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, num_decoder_layers=3,
        dropout_rate=0.1, lowercase=True,
    )  # fmt: skip
    config = TrainConfig(
        model=ModelConfig(name="test", shape=shape),
        data=DataConfig(
            name="restaurants", size=160, max_source_tokens=16, max_target_tokens=8, split=SplitConfig(0.1, 0.1, 0.1)
        ),
        stage=Stage.finetune,
        device=Device.cpu,
        precision=Precision.fp32,
        finetune=FinetuneConfig(
            steps=6, batch_size=8, lr=1e-2, warmup_steps=2, log_every=1, eval_every=3, eval_rows=4, save_every=2, keep=9
        ),
        tracking=TrackingConfig(mode=TrackingMode.disabled),
    )
    for key, value in changes.items():
        holder: Any = config
        *parents, name = key.split("__")
        for parent in parents:
            holder = getattr(holder, parent)
        assert hasattr(holder, name), key
        setattr(holder, name, value)
    return config


def curve(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, loss of layer 1), the last word where a resumed run repeats a step."""
    points = [record for record in read_metrics(run_dir) if "train/loss" in record]
    return {record["step"]: (record["train/loss"], record["train/loss_layer_01"]) for record in points}


def scores(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["eval/rougeL"] for record in read_metrics(run_dir) if "eval/rougeL" in record}


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir) if record.get("event") == name]


def train_job(config: TrainConfig, run_dir: Path) -> None:
    """What a worker process runs; its output goes to a file beside the run."""
    from train.run import train

    raise SystemExit(train(config, run_dir))


def _enter(environment: dict[str, str], log: Path, job: Callable[..., None], arguments: Sequence[Any]) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    job(*arguments)


def start_processes(
    count: int, job: Callable[..., None], *arguments: Any, log: Path, environment: dict[str, str] | None = None
) -> list[ForkServerProcess]:
    """Start ``job(*arguments)`` in ``count`` processes that can find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **(environment or {})}
        if count == 1:
            own = environment or {}
        process = FORKS.Process(target=_enter, args=(own, log, job, arguments))
        process.start()
        processes.append(process)
    return processes


def join(processes: Sequence[ForkServerProcess]) -> list[int]:
    """Exit codes. When one process fails the others are killed, as a launcher would do."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.join(2)
            break
        processes[-1].join(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return [process.exitcode or 0 for process in processes]


def run_processes(
    count: int, job: Callable[..., None], *arguments: Any, log: Path, environment: dict[str, str] | None = None
) -> list[int]:
    return join(start_processes(count, job, *arguments, log=log, environment=environment))
