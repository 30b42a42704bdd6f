"""Runs the tests that ask for ``each_runner`` once with every runner of the engine."""

import pytest

from calm.config import RunnerName
from serve.native.build import NativeError, library

from . import models


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The graph runner parks nobody and asks the full head: what else there is, is not asked of it."""
    kept, left = [], []
    for item in items:
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        asked = {name for value in given if isinstance(name := getattr(value, "name", value), str)}
        beyond = asked & {"rebatch", "rebatch-wide", "candidates", "screened"} or item.get_closest_marker("not_graph")
        (left if "graph" in asked and beyond else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def need_native() -> None:
    """Skip where no C++ compiler is at hand."""
    try:
        library()
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[RunnerName.eager, RunnerName.native, RunnerName.graph], ids=lambda name: name.value)
def each_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunnerName:
    name: RunnerName = request.param
    if name is RunnerName.native:
        need_native()
    monkeypatch.setattr(models, "RUNNER", name)
    return name
