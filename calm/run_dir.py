"""The folder of a run, ``runs/<program>/<time>``: new, made exclusively, and one for all processes of a run.

No name made here holds ``=``, ``,`` or a blank: it is typed back in the next command.
"""

import os
import subprocess
from datetime import datetime
from pathlib import Path

RUN_DIR_ENV = "CALM_RUN_DIR"
_chosen: dict[str, str] = {}


def run_dir(program: str, *, create: bool = True) -> str:
    """Folder of the run that this process belongs to, the same at every call; relative to the working directory.

    A program that launched this process says so in CALM_RUN_DIR. Processes started side by side by
    ``accelerate launch`` or ``torchrun`` agree through the start time of their common parent.
    """
    if RUN_DIR_ENV in os.environ:
        return os.environ[RUN_DIR_ENV]
    if program not in _chosen:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            folder = Path("runs", program, f"{_parent_start()}-{os.getppid()}")
            if create:
                folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = _new(Path("runs", program), create)
        _chosen[program] = str(folder)
    return _chosen[program]


def forget_run_dir() -> None:
    """The next call of run_dir chooses anew."""
    _chosen.clear()


def is_first_process() -> bool:
    """True in a run's only process and in its process 0."""
    return int(os.environ.get("RANK", "0")) == 0


def _new(parent: Path, create: bool) -> Path:
    while True:
        folder = parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        if not create:
            return folder
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another run took this microsecond
        return folder


def _parent_start() -> str:
    """Start of the parent process, equal in all its children: from /proc, else (macOS) as `ps` tells it."""
    parent = os.getppid()
    try:
        ticks = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
        boot = int(Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0])
        start = datetime.fromtimestamp(boot + ticks // os.sysconf("SC_CLK_TCK"))
    except FileNotFoundError:
        command = ["ps", "-o", "lstart=", "-p", str(parent)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
        start = datetime.strptime(" ".join(told.stdout.split()), "%a %b %d %H:%M:%S %Y")
    return start.strftime("%Y-%m-%d_%H-%M-%S")
