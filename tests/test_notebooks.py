"""Notebooks read results and narrate: kept without outputs, importing nothing that evaluates or trains.

That they run is tested by nbmake: ``make test`` hands it the folder.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_imports import ROOT, imported

FOLDER = ROOT / "notebooks"
NAMES = ["01_confidence", "02_calibration", "03_speed_quality"]
MAY_IMPORT = {"calm", "numpy", "pandas", *sys.stdlib_module_names}
LINES = 25  # of a cell
OF_THE_MAKING = re.compile(r"\b(issue|session|helper|reviewer|agent|prompt|todo|fixme)\b", re.IGNORECASE)


def notebook(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    return value


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_these_are_all() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir() if path.name != ".ipynb_checkpoints") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_they_are_kept_without_outputs(name: str) -> None:
    kept = notebook(name)
    assert set(kept["metadata"]) == {"kernelspec", "language_info"}
    assert kept["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert kept["metadata"]["language_info"] == {"name": "python"}
    for cell in kept["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert len(source(cell).splitlines()) <= LINES, source(cell)


@pytest.mark.parametrize("name", NAMES)
def test_they_import_the_library_and_nothing_that_evaluates_or_trains(name: str, tmp_path: Path) -> None:
    code = [source(cell) for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    file = tmp_path / "notebook.py"
    file.write_text("\n".join(code), encoding="utf-8")
    assert {module.split(".")[0] for module in imported(file, tmp_path)} <= MAY_IMPORT
    calls = [node.func for node in ast.walk(ast.parse("\n".join(code))) if isinstance(node, ast.Call)]
    called = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
    assert not called & {"train", "backward", "system", "Popen", "open", "to_parquet", "write_text"}


@pytest.mark.parametrize("name", NAMES)
def test_they_speak_of_results_and_not_of_their_making(name: str) -> None:
    cells = notebook(name)["cells"]
    assert cells[0]["cell_type"] == "markdown" and source(cells[0]).startswith("# ")
    assert sum(cell["cell_type"] == "markdown" for cell in cells) >= 5
    for cell in cells:
        text = source(cell).replace('"session"', "")  # a clock of eval.throughput
        assert not OF_THE_MAKING.search(text), text


def test_a_share_of_layers_is_not_called_a_speed_up() -> None:
    text = "\n".join(source(cell) for cell in notebook("03_speed_quality")["cells"])
    assert "static depth" in text and "95 %" in text and "That is not time" in text
    assert not re.search(r"speed-?up", text)
