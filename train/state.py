"""Training checkpoints: ``checkpoints/step-000123/{model/, optimizer.*, trainer_state.json, MANIFEST.json}``.

Each is complete or absent. ``latest`` and ``best`` beside them name folders; whoever resumes does not trust them
but takes the newest folder whose files match their hashes. There is no random state to keep: order and dropout
are functions of seed and step.
"""

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from calm.checkpoint import atomic_folder, failpoint, read_json, verify_manifest, write_atomic, write_json
from calm.errors import CheckpointError
from calm.models import folder as model_folder
from calm.models.speaking import SpeakingModel

from .batches import Position
from .lora import ADAPTER, Lora
from .optim import save_optimizer

FORMAT = 1
STATE = "trainer_state.json"


@dataclass
class Window:
    """Sums since the last log line; kept in checkpoints, so that a resumed run logs the same means."""

    loss: float = 0.0
    tokens: int = 0
    layer_losses: dict[str, float] = field(default_factory=dict)
    layer_tokens: dict[str, int] = field(default_factory=dict)
    exit_spread: float | None = None
    bad_steps: int = 0


@dataclass
class Best:
    """The best validation score so far."""

    step: int = -1
    rouge_l: float = -1.0


@dataclass
class TrainerState:
    """Everything besides weights and optimizer that the next step depends on, and what the run has been through.

    Attributes:
        step: optimizer steps done, bad ones included.
        bad_in_a_row: skipped steps since the last applied one.
        validated: step of the last validation.
        settings: of the run when this was written, plain values.
        history: what happened: resumes and changed settings, each with its step.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0
    validated: int = 0
    best: Best = field(default_factory=Best)
    window: Window = field(default_factory=Window)
    settings: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "TrainerState":
        """Raises CheckpointError when ``folder``/trainer_state.json has another form."""
        values = read_json(folder / STATE)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise CheckpointError(f"{folder / STATE} was written by another version; resume with that one")
        try:
            nested: dict[str, Any] = {"position": Position, "best": Best, "window": Window}
            parts: dict[str, Any] = {k: nested[k](**value) if k in nested else value for k, value in values.items()}
            return cls(**parts)
        except TypeError as error:
            raise CheckpointError(f"{folder / STATE}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(
    run_dir: Path,
    model: SpeakingModel,
    optimizer: tuple[dict[str, Tensor], dict[str, Any]],
    kind: str,
    state: TrainerState,
    lora: Lora | None = None,
) -> Path:
    """Write one checkpoint. Raises CheckpointError when the disk refuses; earlier ones stay as they are.

    Args:
        model: a plain one, the products of ``lora`` added in.
    """
    target = folder_of(run_dir, state.step)
    tensors, scalars = optimizer
    counted = [*model.state_dict().values(), *tensors.values()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in counted)
    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir} has vanished: its metrics and checkpoints are gone; the run stops")
    with atomic_folder(target, failpoints="ckpt", needed=needed) as folder:
        failpoint("ckpt.before_weights")
        model_folder.save(model, folder / "model")
        if lora is not None:
            (folder / ADAPTER).mkdir()
            lora.save(folder / ADAPTER)
        failpoint("ckpt.after_weights")
        save_optimizer(folder, tensors, scalars, kind)
        failpoint("ckpt.after_optimizer")
        write_json(folder / STATE, state.to_json())
    point(run_dir, "latest", target)
    return target


def point(run_dir: Path, name: str, target: Path) -> None:
    """``checkpoints/<name>`` holds the name of a folder beside it."""
    write_atomic(run_dir / "checkpoints" / name, target.name + "\n")


def step_of(folder: Path) -> int | None:
    """123 for ``step-000123``, None for what is no checkpoint's name."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if folder.name.startswith("step-") and digits.isdecimal() else None


def steps_in(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run, newest first, valid or not."""
    numbered = [(step_of(path), path) for path in (run_dir / "checkpoints").glob("step-*")]
    return [path for _, path in sorted(((n, path) for n, path in numbered if n is not None), reverse=True)]


def steps_after(run_dir: Path, step: int) -> list[Path]:
    """Checkpoints beyond ``step``: a branch that a run going on from ``step`` leaves behind."""
    return [path for path in steps_in(run_dir) if (step_of(path) or 0) > step]


def is_whole(folder: Path) -> bool:
    """Whether all files of a checkpoint match their hashes. Reads every byte."""
    try:
        verify_manifest(folder)
    except CheckpointError:
        return False
    return True


def rotate(run_dir: Path, state: TrainerState, keep: int, whole: set[Path]) -> None:
    """Delete all but the newest ``keep`` checkpoints up to the state's step, and the best one.

    A damaged folder is not among the kept ones, and no whole one is deleted in its favour.

    Args:
        whole: checkpoints known to be undamaged, which need no reading; those found so are added.
    """
    best, kept = folder_of(run_dir, state.best.step), 0
    later = steps_after(run_dir, state.step)
    for folder in [path for path in steps_in(run_dir) if path not in later]:
        if kept >= keep:
            if folder != best:
                shutil.rmtree(folder)
        elif folder in whole or is_whole(folder):
            whole.add(folder)
            kept += 1


def discard(run_dir: Path, abandoned: list[Path], state: TrainerState) -> list[str]:
    """Delete the checkpoints of a branch that the run left, but not what it has written itself; returns their names.

    ``best`` never names a deleted one: it names the best of the branch that goes on, or is gone.
    """
    own = {folder_of(run_dir, state.step), folder_of(run_dir, state.best.step)}
    gone = [path for path in abandoned if path not in own and path.is_dir()]
    for path in gone:
        shutil.rmtree(path)
    pointer = run_dir / "checkpoints" / "best"
    if pointer.is_file() and not (run_dir / "checkpoints" / pointer.read_text().strip()).is_dir():
        pointer.unlink()
        if state.best.step >= 0:
            point(run_dir, "best", folder_of(run_dir, state.best.step))
    return [path.name for path in gone]


def newest_valid(where: Path) -> tuple[Path, list[str]]:
    """The checkpoint to resume from: ``where`` itself, or the newest undamaged one of a run folder.

    Returns it with one line for each newer one that was skipped.
    Raises CheckpointError when there is none.
    """
    if (where / STATE).is_file() or where.name.startswith("step-"):
        verify_manifest(where)
        return where, []
    skipped: list[str] = []
    for candidate in steps_in(where):
        try:
            verify_manifest(candidate)
        except CheckpointError as error:
            skipped.append(f"skipped {candidate.name}: {error}")
            continue
        return candidate, skipped
    told = "; ".join(skipped) or "it holds no checkpoints/step-N"
    raise CheckpointError(f"nothing to resume in {where}: {told}")
