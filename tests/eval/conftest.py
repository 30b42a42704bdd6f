"""One certified model folder for all tests of a process; who changes it works on a copy."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from calm.config import CalibrateConfig, CalibrationConfig, Measure, Table1Config, TrackingConfig, TrackingMode
from eval import calibrate, table1

from .folders import random_folder

MEASURES = [Measure.softmax, Measure.state, Measure.classifier]
TOLERANCE = 0.45


def calibration_config(folder: Path, **changes: Any) -> CalibrateConfig:
    settings: dict[str, Any] = {"measures": MEASURES, "tolerances": [TOLERANCE], "grid_size": 5, "batch_size": 16}
    wanted = CalibrationConfig(**{**settings, **changes})
    return CalibrateConfig(str(folder), calibration=wanted, processes=1, tracking=TrackingConfig(TrackingMode.disabled))


def table_config(folder: Path, **changes: Any) -> Table1Config:
    settings: dict[str, Any] = {"tolerance": TOLERANCE, "batch_size": 16, "bootstrap": 50, "processes": 1}
    settings["tracking"] = TrackingConfig(TrackingMode.disabled)
    return Table1Config(str(folder), **{**settings, **changes})


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model`` and ``rows.jsonl`` in a folder, calibrated; ``calibration_run`` and ``table_run`` beside them."""
    parent = tmp_path_factory.mktemp("certified")
    folder = random_folder(parent)
    for name in ("calibration_run", "table_run"):
        (parent / name).mkdir()
    calibrate.run(calibration_config(folder), parent / "calibration_run")
    table1.run(table_config(folder), parent / "table_run")
    return parent


@pytest.fixture
def own_copy(certified: Path, tmp_path: Path) -> Path:
    """A copy of the certified folder that a test may change."""
    return Path(shutil.copytree(certified / "model", tmp_path / "model"))
