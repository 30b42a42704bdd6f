"""On a CPU, one process per core with one thread each: more than twice as fast as threads (T5, tiny shapes).

The parent starts ``python -m train`` again N times, shows what process 0 prints, passes signals on, and ends all
when one dies. Under ``accelerate launch`` or ``torchrun`` it does nothing: they started the processes already.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from calm.config import Device, FinetuneConfig, Stage, TrainConfig
from calm.environment import ONE_OF_SEVERAL, usable_cores
from calm.errors import ConfigError
from calm.run_dir import RUN_DIR_ENV

GRACE_S = 60.0  # for the others to leave after a signal
MATE_GRACE_S = 5.0  # for the others to notice that one has failed
LAUNCHED = "CALM_LAUNCHED"  # set in the processes started here
ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-P", "-m", "train"]  # -P: a train.py in the working folder must not be taken for ours


def process_count(config: TrainConfig) -> int:
    """How many processes to start here; 1 means to go on in this one.

    Raises ConfigError when ``processes=`` does not fit the batch, or contradicts the launcher that started us.
    """
    world = os.environ.get("WORLD_SIZE")
    if world is not None:
        if config.processes not in (None, int(world)):
            raise ConfigError(f"processes={config.processes}, but the launcher started {world}; drop processes=")
        return 1
    if config.stage is Stage.calibrate:
        return 1  # it starts processes of its own
    parts = config.finetune.batch_size // config.finetune.accumulation
    if config.processes is not None:
        check_divisible(config.finetune, config.processes)
        return config.processes
    if not on_cpu(config.device):
        return 1
    return next(count for count in range(min(usable_cores(), parts) or 1, 0, -1) if parts % count == 0 or count == 1)


def on_cpu(device: Device) -> bool:
    """Whether training will run on a CPU. Asks torch, which is slow to import, only where a GPU may be."""
    if device is not Device.auto:
        return device is Device.cpu
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return True
    import torch

    return not torch.cuda.is_available()


def check_divisible(config: FinetuneConfig, world: int) -> None:
    """Raise ConfigError when ``batch_size`` rows cannot be dealt evenly to processes and micro-batches."""
    parts = world * config.accumulation
    if config.batch_size % parts:
        raise ConfigError(
            f"finetune.batch_size={config.batch_size} is the global batch and must be divisible by processes x "
            f"finetune.accumulation = {world} x {config.accumulation} = {parts}; "
            f"try finetune.batch_size={-(-config.batch_size // parts) * parts} or another number of processes"
        )


class Workers:
    """The processes of one run."""

    def __init__(self, count: int, command: Sequence[str], run_dir: Path) -> None:
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._signals = 0
        port = _free_port()
        self.processes = [self._start(rank, count, port, list(command), run_dir) for rank in range(count)]

    def log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def _start(self, rank: int, count: int, port: int, command: list[str], run_dir: Path) -> "subprocess.Popen[bytes]":
        environment = {
            **ONE_OF_SEVERAL,
            **os.environ,
            LAUNCHED: "1",
            RUN_DIR_ENV: str(run_dir),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }
        output: IO[bytes] | None = None if rank == 0 else open(self.log(rank), "wb")
        try:
            # a session of their own: Ctrl-C reaches them through us, once
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        finally:
            if output is not None:
                output.close()

    def pass_on(self, signum: int, _frame: FrameType | None = None) -> None:
        """First signal: let them save. Second: end them."""
        self._signals += 1
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum if self._signals == 1 else signal.SIGKILL)

    def wait(self) -> tuple[int, int]:
        """(rank, exit code) of the first failure, or (0, 0). When one fails the others are ended."""
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                self._end_all()
                codes = [process.returncode for process in self.processes]
                rank = 0 if codes[0] == codes[failed[0]] else failed[0]
                return rank, codes[rank] or 0
            if all(code == 0 for code in codes):
                return 0, 0
            time.sleep(0.05)

    def _end_all(self) -> None:
        """They notice a lost mate, or the signal, by themselves; whoever does not within the grace is killed."""
        deadline = time.monotonic() + (GRACE_S if self._signals else MATE_GRACE_S)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def launch(count: int, overrides: Sequence[str], run_dir: Path) -> int:
    """Run ``count`` processes to their end; returns the exit code to leave with."""
    workers = Workers(count, [*COMMAND, *overrides], run_dir)
    before = {each: signal.signal(each, workers.pass_on) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        rank, code = workers.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if code and rank:
        tail = workers.log(rank).read_text(errors="replace").splitlines()[-20:]
        print(f"process {rank} failed; the end of {workers.log(rank)}:", *tail, sep="\n", file=sys.stderr)
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
