"""Runs the tests that ask for ``each_runner`` once with every runner of the engine."""

import pytest

from calm.config import RunnerName
from serve.native.build import NativeError, library

from . import models


def need_native() -> None:
    """Skip where no C++ compiler is at hand."""
    try:
        library()
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[RunnerName.eager, RunnerName.native], ids=lambda name: name.value)
def each_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunnerName:
    name: RunnerName = request.param
    if name is RunnerName.native:
        need_native()
    monkeypatch.setattr(models, "RUNNER", name)
    return name
