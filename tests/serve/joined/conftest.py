"""One model for all joined tests, and two servers that several files share: starting an engine takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from calm import save
from calm.config import Measure
from serve.engine import Engine
from serve.options import EngineOptions
from tests.scripted import early_exit, random_t5

from .. import faulty
from ..test_certified import artifact
from .serving import VOCABULARY, Joined, held

LENGTH = 24
NARROW = EngineOptions(max_batch=2, max_waiting=200, poison=True)
WIDE = EngineOptions(max_batch=8, max_waiting=200, poison=True)
MEASURES = (Measure.softmax, Measure.state, Measure.classifier)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny random model that takes thresholds on several measures."""
    model = early_exit(random_t5(vocabulary=VOCABULARY), length=LENGTH)
    made = save(model, tmp_path_factory.mktemp("joined") / "model")
    for measure in MEASURES:
        artifact(measure, picked=measure is Measure.softmax).save(made / "calibration")
    return made


@pytest.fixture(scope="session")
def here(folder: Path) -> Engine:
    """The same model in this process."""
    return Engine(folder, WIDE)


@pytest.fixture(scope="session")
def narrow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    """Two slots."""
    with held(folder, NARROW, tmp_path_factory.mktemp("narrow")) as made:
        yield made


@pytest.fixture(scope="session")
def wide(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    """Eight slots, and words that make trouble (tests.serve.faulty, gate.BREAK)."""
    with held(folder, WIDE, tmp_path_factory.mktemp("wide"), faulty.work) as made:
        yield made
