"""A machine that has torch and transformers, and none of the libraries that configure, track or fetch."""

import os
from pathlib import Path

ABSENT = ("hydra", "omegaconf", "datasets", "evaluate", "wandb")
ROOT = Path(__file__).parents[1]


def bare_path(folder: Path) -> str:
    """A PYTHONPATH under which no Python process, and none that it starts, can import them."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    (folder / "sitecustomize.py").write_text(blocked)
    return os.pathsep.join([str(folder), str(ROOT)])
