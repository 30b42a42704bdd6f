"""Settings of stage 1 that only some trainings use: low-rank adapters, dropped layers, a curriculum of exits."""

from dataclasses import dataclass
from enum import Enum

from .errors import ConfigError


class OverTime(str, Enum):
    """How a rate rises in the course of a training (calm/layerskip.py)."""

    constant = "constant"
    exponential = "exponential"


class Curriculum(str, Enum):
    """Which exits have a loss at which step (calm/layerskip.py)."""

    none = "none"
    rotational = "rotational"
    gradual = "gradual"


@dataclass
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al., arXiv 2106.09685), through peft; off without ``rank``."""

    rank: int | None = None
    alpha: int = 16  # the update counts alpha / rank
    dropout: float = 0.0  # of what goes into an adapter
    targets: list[str] | None = None  # names of linear layers, such as q_proj; None: all linear layers of the stack
    adapter: str | None = None  # folder of an earlier adapter of the same weights to go on from

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"finetune.lora.rank must be at least 1, got {self.rank}; null is no adapter")
        if self.alpha < 1:
            raise ConfigError(f"finetune.lora.alpha must be at least 1, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"finetune.lora.dropout must lie in [0, 1), got {self.dropout}")
        if self.targets is not None and (not self.targets or len(set(self.targets)) != len(self.targets)):
            raise ConfigError("finetune.lora.targets needs at least one name, and none twice; null is all of them")
        if self.adapter is not None and self.rank is None:
            raise ConfigError("finetune.lora.adapter= goes on from an adapter; give its finetune.lora.rank too")


@dataclass
class LayerDropoutConfig:
    """Whole decoder layers are left out, each row for itself (LayerSkip, arXiv 2404.16710, section 4.1.1)."""

    p_max: float = 0.0  # the last layer's rate; the layers below have less, the first none; 0: off
    over_time: OverTime = OverTime.constant  # exponential: from 0 at the first step to p_max at the last

    def __post_init__(self) -> None:
        if not 0 <= self.p_max < 1:
            raise ConfigError(f"finetune.layer_dropout.p_max must lie in [0, 1), got {self.p_max}")


@dataclass
class ExitCurriculumConfig:
    """Not every exit has a loss at every step (LayerSkip, arXiv 2404.16710, section 4.1.2)."""

    kind: Curriculum = Curriculum.none
    every: int = 4  # R of the rotational one: each exit has a loss once in so many steps

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"finetune.exit_curriculum.every must be at least 1, got {self.every}")
