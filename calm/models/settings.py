"""early_exit.json: what a model folder says beyond being a T5."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CheckpointError, ConfigError

FORMAT = 1


@dataclass
class EarlyExitSettings:
    """Exits, lengths and text conventions that a model was trained with and is served with.

    Attributes:
        exit_layers: layers after which a row may leave, ascending, within 1..L-1.
        max_source_tokens: source length in tokens, all that is put around it included.
        max_target_tokens: N, the longest answer in tokens, EOS included.
        source_prefix: text put before every source.
        source_start: ids put before that, such as a decoder-only model's BOS or the head of its chat template.
        source_end: ids put after every source; None is EOS alone, as a T5's encoder wants it.
        truncate: ``head`` or ``head_tail``: which tokens of a longer source are kept.
        data: the corpus settings the model was trained on last, as plain values.
        earlier_data: those of the trainings before that, on another corpus or otherwise split.
        has_classifier: True once the exit classifier has been trained.
        model: name of the architecture that training started from, such as ``t5-v1_1-small``.
        skip_schedule: plain values of the LayerSchedule that it was trained to be decoded by; None of other models.
    """

    exit_layers: list[int]
    max_source_tokens: int = 512
    max_target_tokens: int = 128
    source_prefix: str = ""
    source_start: list[int] = field(default_factory=list)
    source_end: list[int] | None = None
    truncate: str = "head"
    data: dict[str, Any] = field(default_factory=dict)
    earlier_data: list[dict[str, Any]] = field(default_factory=list)
    has_classifier: bool = False
    model: str = ""
    skip_schedule: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str) -> "EarlyExitSettings":
        """Raise CheckpointError for another format or for unknown and missing keys."""
        values = dict(values)
        if values.pop("format", None) != FORMAT:
            raise CheckpointError(f"{where}: written in another format than {FORMAT}; write the folder anew")
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{where}: {error}") from None


def need_exits(settings: EarlyExitSettings, what: str) -> None:
    """Raise ConfigError where the model was trained by a schedule of layers: its other layers never learnt to speak."""
    if settings.skip_schedule is not None:
        raise ConfigError(
            f"{what}: this model was trained by a schedule of layers (skip_schedule in early_exit.json), so it has no "
            "exits; decode it with calm.SkipSchedule, or give a folder that was trained without finetune.skip_schedule"
        )


def default_exit_layers(num_layers: int, exit_layers: list[int] | None = None, min_exit_layer: int = 1) -> list[int]:
    """``exit_layers`` or 1..L-1, without those below ``min_exit_layer``.

    Raises CheckpointError for layers outside 1..L-1, and when none is left though the model has more than one layer.
    """
    layers = list(range(1, num_layers)) if exit_layers is None else list(exit_layers)
    outside = [layer for layer in layers if not 1 <= layer < num_layers]
    if outside:
        raise CheckpointError(
            f"exit_layers {outside} lie outside 1..{num_layers - 1}: the model has {num_layers} decoder layers "
            "and the last one always speaks"
        )
    kept = [layer for layer in layers if layer >= min_exit_layer]
    if not kept and num_layers > 1:
        raise CheckpointError(
            f"min_exit_layer={min_exit_layer} leaves no exit of {layers}: the model has {num_layers} decoder layers "
            f"and the last one is no exit; give at most {max(layers, default=num_layers - 1)}"
        )
    return kept
