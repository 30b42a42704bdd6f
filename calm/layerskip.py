"""LayerSkip's curves (Elhoushi et al., arXiv 2404.16710, section 4.1): which layers drop out, which exits learn when.

The paper counts layers from 0 and steps from 0; here layers count from 1. Functions of numbers alone.
"""

import math
from collections.abc import Sequence

from .finetune_config import Curriculum, ExitCurriculumConfig, LayerDropoutConfig, OverTime


def drop_rates(config: LayerDropoutConfig, num_layers: int, step: int, steps: int) -> list[float]:
    """Rate at which each layer 1..L is left out at a step of ``steps``: p_max D(l) S(t) (equation 2).

    D(l) = exp(l ln 2 / (L - 1)) - 1 for l = 0..L-1 (equation 3): none in the first layer, p_max in the last. S(t) is 1,
    which the paper takes where a trained model is trained on, or exp(t ln 2 / (T - 1)) - 1 (equation 4).
    """
    time = 1.0 if config.over_time is OverTime.constant else _rise(step, steps)
    return [config.p_max * _rise(layer, num_layers) * time for layer in range(num_layers)]


def _rise(at: int, count: int) -> float:
    """exp(at ln 2 / (count - 1)) - 1: 0 at 0, 1 at count - 1 and beyond; a single one is the first."""
    return math.expm1(min(at, count - 1) * math.log(2) / (count - 1)) if count > 1 else 0.0


def exit_weights(num_layers: int, scale: float) -> list[float]:
    """e(l) of layers 1..L (equation 7), not yet normalised: scale times the sum of 0..l, and more for the last one.

    The first layer has 0. The last has L - 1 beside scale times the sum of 0..L-2.
    """
    early = [scale * layer * (layer + 1) / 2 for layer in range(num_layers - 1)]
    return [*early, num_layers - 1 + scale * (num_layers - 2) * (num_layers - 1) / 2] if num_layers > 1 else [1.0]


def exits_at(config: ExitCurriculumConfig, layers: Sequence[int], step: int, steps: int) -> list[int]:
    """Those of ``layers`` (ascending, the model's last one included) that have a loss at a step: C(t, l) of equation 6.

    Rotational: every R-th, moving on by one from step to step. Gradual: the last one alone at first, and one more,
    downwards, every T / (2 n) steps of n layers, so that all of them learn in the second half. The last one always has
    a loss: its words are what the model says at full depth.
    """
    count = len(layers)
    if config.kind is Curriculum.rotational:
        return [
            layer
            for place, layer in enumerate(layers)
            if place % config.every == step % config.every or place == count - 1
        ]
    if config.kind is Curriculum.gradual:
        return list(layers[max(0, count - 1 - 2 * count * step // max(1, steps)) :])
    return list(layers)
