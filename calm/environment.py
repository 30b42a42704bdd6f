"""Where a number comes from: code version, library versions, machine. Every measured run keeps this beside it."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "wandb",
    "rouge-score",
)
ROOT = Path(__file__).resolve().parents[1]
# of a process that is one of several on a CPU: one thread, no spinning, and glibc keeps freed memory instead of giving
# it back to the kernel every step
ONE_OF_SEVERAL = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def environment() -> dict[str, Any]:
    """JSON-ready stamp: git, versions, cpu, threads, accelerator."""
    import torch

    return {
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "argv": _argv(),
    }


def _argv() -> list[str]:
    """The command line, without the place of this checkout in it."""
    program = Path(sys.argv[0])
    if program.is_absolute() and program.is_relative_to(ROOT):
        return [program.relative_to(ROOT).as_posix(), *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit and whether tracked files differ from it; both None without git.

    Records of measurements are no code, and one that a run has just written does not make the next one dirty; what
    reads records says which in its settings.

    Outside a checkout CALM_COMMIT tells the commit, where it is set: of a copy on another machine.
    """
    try:
        if not (root / ".git").exists():
            return {"commit": os.environ.get("CALM_COMMIT") or None, "dirty": None}
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "diff", "--name-only", "HEAD").splitlines()
        return {"commit": commit, "dirty": not all(map(_is_record, changed))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _is_record(path: str) -> bool:
    """What an earlier measurement left; a model in there is measured on, and so as good as code."""
    return path.startswith("results/") and "/model/" not in path


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use: its affinity, capped by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores
