"""A run whose settings are complete already, in one process: for programs that start a training themselves.

    python -m train.settled settings.json RUN_DIR

``settings.json`` holds a TrainConfig as plain values, as a checkpoint's ``trainer_state.json`` does. Needs nothing that
configures programs. Leaves with the status of ``python -m train``, and ends when the program that started it ends.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from calm.child import die_with_parent
from calm.config import TrainConfig
from calm.errors import CalmError, ConfigError
from calm.typed import typed


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2:
        print("error: python -m train.settled takes a file of settings and a run folder", file=sys.stderr)
        return 1
    settings, run_dir = map(Path, words)
    die_with_parent()
    try:
        config = read(settings)
        from .run import train  # torch and transformers take seconds: a mistake is answered before

        return train(config, run_dir)
    except KeyboardInterrupt:
        return 130
    except (CalmError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def read(path: Path) -> TrainConfig:
    """Raises ConfigError where the file holds no settings, OSError where it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: an object with those of a TrainConfig is needed")
    return typed(TrainConfig, values)


if __name__ == "__main__":
    sys.exit(main())
