"""How well the exit classifier tells agreement with the full model, layer by layer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calm.checkpoint import write_json

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LayerReport:
    """One layer on the validation tokens, classifier read at P(exit) = 1/2.

    Attributes:
        layer: 1..L-1.
        positive_rate: share of tokens on which the layer says what the full model says.
        exit_rate: share on which the classifier would exit.
        f1_exit, f1_stay: F1 of the class "exit" and of the class "don't exit"; None where neither occurs.
        auroc: chance that an agreeing token scores above a disagreeing one; None with one class only.
    """

    layer: int
    positive_rate: float
    exit_rate: float
    f1_exit: float | None
    f1_stay: float | None
    auroc: float | None


@dataclass(frozen=True)
class ClassifierReport:
    """What stage 2 did. Losses are those of the chosen objective on the validation tokens."""

    objective: str
    steps: int
    best_step: int
    untrained_loss: float
    validation_loss: float
    train_tokens: int
    validation_tokens: int
    layers: list[LayerReport]
    history: list[dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    def lines(self) -> list[str]:
        """A table for people."""
        head = f"{'layer':>5} {'agrees':>7} {'exits':>7} {'F1 exit':>8} {'F1 stay':>8} {'AUROC':>7}"
        rows = [
            f"{at.layer:>5} {at.positive_rate:>7.3f} {at.exit_rate:>7.3f} {_cell(at.f1_exit):>8} "
            f"{_cell(at.f1_stay):>8} {_cell(at.auroc):>7}"
            for at in self.layers
        ]
        return [head, *rows]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def f1(predicted: Flags, actual: Flags) -> float | None:
    """2 tp / (2 tp + fp + fn) of the class True; None where it is neither predicted nor there."""
    found = int((predicted & actual).sum())
    total = int(predicted.sum()) + int(actual.sum())
    return 2 * found / total if total else None


def auroc(scores: Floats, actual: Flags) -> float | None:
    """Area under the ROC curve by ranks (Mann-Whitney), ties counted half; None with one class only."""
    positives = int(actual.sum())
    negatives = len(actual) - positives
    if not positives or not negatives:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2  # ranks from 1; equal scores share their mean
    rank_sum = float(mean_rank[place][actual].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def layer_reports(scores: Floats, agrees: Flags, layers: Sequence[int]) -> list[LayerReport]:
    """From the classifier's logits and the labels, both (tokens, layers)."""
    exits = scores > 0
    return [
        LayerReport(
            layer=layer,
            positive_rate=float(agrees[:, index].mean()),
            exit_rate=float(exits[:, index].mean()),
            f1_exit=f1(exits[:, index], agrees[:, index]),
            f1_stay=f1(~exits[:, index], ~agrees[:, index]),
            auroc=auroc(scores[:, index], agrees[:, index]),
        )
        for index, layer in enumerate(layers)
    ]


def flat_metrics(layers: Sequence[LayerReport]) -> dict[str, float | None]:
    """For the tracker: ``classifier/auroc_layer_03`` and so on."""
    return {
        f"classifier/{name}_layer_{at.layer:02d}": getattr(at, name)
        for at in layers
        for name in ("positive_rate", "f1_exit", "f1_stay", "auroc")
    }
