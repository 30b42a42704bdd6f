"""Train rows with other targets than the corpus has: those that a model found (eval.relabel)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DataError
from ..records import Example
from .files import json_lines


def relabelled(rows: Sequence[Example], path: Path, dropped: dict[str, int]) -> list[Example]:
    """The rows that the file names, with its targets; ``dropped`` is told of the others.

    Raises DataError: the file cannot be read, names a row that is none of these, or names one twice.
    """
    targets: dict[str, str] = {}
    for where, values in json_lines(path):
        name, target = values.get("id"), values.get("target")
        if not isinstance(name, str) or not name or not isinstance(target, str) or not target.strip():
            raise DataError(f"{where}: a row needs an id and a target that is not empty")
        if name in targets:
            raise DataError(f"{where}: row {name!r} is there twice")
        targets[name] = target
    there = {row.id for row in rows}
    stranger = next((name for name in targets if name not in there), None)
    if stranger is not None:
        raise DataError(
            f"{path}: row {stranger!r} is not among the {len(rows)} train rows; the file is of another corpus or of "
            "other data.* settings"
        )
    kept = [replace(row, target=targets[row.id]) for row in rows if row.id in targets]
    if len(kept) < len(rows):
        dropped["not in data.targets (train)"] = len(rows) - len(kept)
    return kept
