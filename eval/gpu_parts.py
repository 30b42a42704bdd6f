"""The parts of eval.gpu_check in their order, and what is asked of a Hopper card."""

from collections.abc import Callable

from .gpu_answers import correctness
from .gpu_asked import Part, Record
from .gpu_kernels import kernels
from .gpu_learned import learned
from .gpu_simulated import simulated
from .gpu_timings import ceilings, core, gaps, matrix, training, transformers

PARTS: dict[str, Part] = {
    "kernels": kernels,
    "correctness": correctness,
    "ceilings": ceilings,
    "core": core,
    "gaps": gaps,
    "transformers": transformers,
    "matrix": matrix,
    "simulated": simulated,
    "training": training,
    "learned": learned,
}


def _share(shape: str, batch: int) -> Callable[[Record], float | None]:
    """Of the floor that full depth reaches."""

    def of(part: Record) -> float | None:
        for cell in part[shape]["cells"]:
            if cell["batch"] == batch:
                full = next(entry for entry in cell["entries"] if entry["name"] == "full")
                share: float | None = full["ceiling"]["share_of_memory"]
                return share
        return None

    return of


def _ratio(shape: str, batch: int, rule: str, over_predicted: bool = False) -> Callable[[Record], float | None]:
    """Early exit by ``state`` on tight traces over own full depth, by a decode step."""

    def of(part: Record) -> float | None:
        for row in part[shape]["ratios"]:
            wanted = (row["batch"], row["rule"], row["measure"], row["trace"], row["against"], row["clock"])
            if wanted == (batch, rule, "state", "tight", "own-full", "decode"):
                ratio: float = row["ratio"]
                if over_predicted:
                    return ratio / row["predicted"] if row["predicted"] else None
                return ratio
        return None

    return of


def _over_transformers(shape: str, how: str) -> Callable[[Record], float | None]:
    """Our full depth's tokens a second over theirs, at batch 1."""

    def of(part: Record) -> float | None:
        ratio: float = part[f"{shape} {how}"]["decode_s"] / part[f"{shape} ours"]["decode_s"]
        return ratio

    return of


GOALS: dict[str, tuple[str, float, Callable[[Record], float | None]]] = {
    "base, batch 64: share of the floor": ("core", 0.5, _share("base", 64)),
    "small, batch 64: share of the floor": ("core", 0.35, _share("small", 64)),
    "base, batch 1: share of the floor": ("core", 0.25, _share("base", 1)),
    "small, batch 1: share of the floor": ("core", 0.12, _share("small", 1)),
    "base, batch 1: over transformers, compiled": ("transformers", 3.0, _over_transformers("base", "compiled")),
    "small, batch 1: over transformers, compiled": ("transformers", 3.0, _over_transformers("small", "compiled")),
    "base, batch 1: over transformers, eager": ("transformers", 5.0, _over_transformers("base", "eager")),
    "small, batch 1: over transformers, eager": ("transformers", 5.0, _over_transformers("small", "eager")),
    "base, batch 1: early exit over full": ("core", 1.3, _ratio("base", 1, "own")),
    "base, batch 32 compact: early exit over full": ("matrix", 1.4, _ratio("base", 32, "compact")),
    "base, batch 8 sync: early exit over full": ("matrix", 1.25, _ratio("base", 8, "sync")),
    "base, batch 1: early exit by its prediction": ("core", 0.9, _ratio("base", 1, "own", True)),
    "base, batch 32 compact: early exit by its prediction": ("matrix", 0.9, _ratio("base", 32, "compact", True)),
    "base, batch 8 sync: early exit by its prediction": ("matrix", 0.9, _ratio("base", 8, "sync", True)),
    "base, batch 1: 1 - gaps of a step": ("gaps", 0.85, lambda part: 1 - part["base whole"]["gap_share"]),
    "small, batch 1: 1 - gaps of a step": ("gaps", 0.85, lambda part: 1 - part["small whole"]["gap_share"]),
}
