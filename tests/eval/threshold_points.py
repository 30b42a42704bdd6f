"""Curves of thresholds whose losses and depths are known beforehand, and settings for a run within seconds."""

from pathlib import Path
from typing import Any

import numpy as np

from calm.config import DecoderName, Head, Measure, Schedule
from calm.experiment_config import ThresholdsConfig
from eval.thresholds_decode import Curve
from eval.thresholds_rows import Answers, Measured

LAYERS = 4
SOFTMAX = Curve(Measure.softmax, Schedule.constant, Head.full)
DECAYING = Curve(Measure.softmax, Schedule.decaying, Head.full)
STATE = Curve(Measure.state, Schedule.constant, Head.full)
THIN = Curve(Measure.softmax, Schedule.constant, Head.candidates)


def config_of(folder: Path | None = None, **changes: Any) -> ThresholdsConfig:
    settings: dict[str, Any] = {
        "grid_size": 3, "dev_rows": 30, "measures": [Measure.softmax, Measure.state], "heads": [Head.full],
        "tolerances": [0.2, 0.45], "splits": 5, "decoder": DecoderName.batch, "processes": 1, "bootstrap": 30,
    }  # fmt: skip
    return ThresholdsConfig(None if folder is None else str(folder), **{**settings, **changes})


def made_up(losses: dict[Curve, list[float]], articles: int = 400, config: ThresholdsConfig | None = None) -> Measured:
    """Every curve loses about so much at its points below 1, and skips a layer more at each."""
    generator = np.random.default_rng(7)
    full = generator.uniform(0.4, 0.9, articles)
    tokens = generator.integers(2, 9, articles)

    def at(threshold: float, loss: float, depth: int) -> Answers:
        return Answers(threshold, full - loss * generator.uniform(0.5, 1.5, articles), depth * tokens, tokens)

    points = {
        curve: [at(1.0, 0.0, LAYERS), *(at(1 - 0.1 * k, loss, LAYERS - k) for k, loss in enumerate(each, start=1))]
        for curve, each in losses.items()
    }
    static = {layer: at(1.0, 0.1 * (LAYERS - layer), layer) for layer in range(1, LAYERS)}
    return Measured(config or config_of(), LAYERS, articles // 2, at(1.0, 0.0, LAYERS), static, points)
