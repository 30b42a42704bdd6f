"""Train rows with the targets of a file: those that it names, and a clear error for a file that does not fit."""

from pathlib import Path

import pytest

from calm.data.relabelled import relabelled
from calm.errors import DataError
from calm.records import Example

ROWS = [Example(name, f"f{name}", f"source {name}", f"target {name}") for name in "abc"]


def file(folder: Path, *lines: str) -> Path:
    path = folder / "targets.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_rows_that_are_named_get_the_targets_and_the_others_are_left_out(tmp_path: Path) -> None:
    dropped: dict[str, int] = {}
    path = file(tmp_path, '{"id": "c", "target": "new c"}', '{"id": "a", "target": "new a"}')
    assert relabelled(ROWS, path, dropped) == [
        Example("a", "fa", "source a", "new a"),
        Example("c", "fc", "source c", "new c"),
    ]
    assert dropped == {"not in data.targets (train)": 1}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"id": "z", "target": "t"}'], "row 'z' is not among the 3 train rows"),
        (['{"id": "a", "target": "t"}', '{"id": "a", "target": "u"}'], "targets.jsonl:2: row 'a' is there twice"),
        (['{"id": "a", "target": " "}'], "targets.jsonl:1: a row needs an id and a target"),
        (['{"id": "a"}'], "a row needs an id and a target"),
        (['{"id": "", "target": "t"}'], "a row needs an id"),
        (["no json"], "targets.jsonl:1: no JSON"),
        ([], "empty"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, lines: list[str], told: str) -> None:
    with pytest.raises(DataError) as error:
        relabelled(ROWS, file(tmp_path, *lines), {})
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        relabelled(ROWS, tmp_path / "nothing.jsonl", {})
