"""One thread per test process, no network, and a way to run the programs as a user does."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("calm", deadline=None)  # a busy machine is no failure
settings.load_profile("calm")

RunProgram = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """``run_program("train", "+model=tiny", ...)``: ``python -m train ...`` in an empty folder, output captured."""

    def run(
        module: str, *argv: str, cwd: Path = tmp_path, env: dict[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [sys.executable, "-m", module, *argv]
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout
        )

    return run
