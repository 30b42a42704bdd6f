"""Plain values become the settings that they were."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from calm.config import CalibrationConfig, DataConfig, Measure, TrainConfig
from calm.engine_config import ServingConfig
from calm.errors import ConfigError
from calm.typed import typed
from tests.train.tiny import tiny_config


@pytest.mark.parametrize(
    "config", [tiny_config(), tiny_config(model=None, checkpoint="x", exit_layers=[1, 2]), ServingConfig(shape="tiny")]
)
def test_what_json_has_becomes_the_same_settings(config: Any) -> None:
    assert typed(type(config), json.loads(json.dumps(asdict(config)))) == config


def test_what_is_not_named_is_as_by_default() -> None:
    found = typed(TrainConfig, {"data": {"name": "debian"}, "calibration": {"measures": ["state"], "error_prob": 1e-2}})
    assert found == TrainConfig(
        data=DataConfig("debian"), calibration=CalibrationConfig([Measure.state], error_prob=0.01)
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"finetune": {"step": 1}}, "unknown setting finetune.step; there are accumulation, "),
        ({"finetune": {"steps": "many"}}, "finetune.steps='many' is no int"),
        ({"finetune": {"steps": True}}, "finetune.steps=True is no int"),
        ({"stage": "rest"}, "stage='rest' is none; choose from all, finetune, classifier, calibrate"),
        ({"calibration": {"measures": ["state", "gap"]}}, "calibration.measures='gap' is none"),
        ({"exit_layers": 3}, "exit_layers=3 is no list"),
        ({"exit_layers": ["3"]}, "exit_layers='3' is no int"),
        ({"seed": None}, "seed=None is no int"),
        ({"data": "debian"}, "data='debian' is no DataConfig"),
        ({"finetune": {"batch_size": 0}}, "finetune.batch_size must lie in"),
    ],
)
def test_a_mistake_is_told_with_its_key(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        typed(TrainConfig, values)
