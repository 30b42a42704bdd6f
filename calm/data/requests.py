"""Requests that a server has logged: sources without references, which textual consistency needs none of.

A log has one JSON object a line; those with a ``prompt`` are requests (serve logs prompts when its operator asks for
it), other lines are skipped. A text that was sent often counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError
from .files import json_lines
from .rows import RawRow


def rows(path: Path) -> Iterator[RawRow]:
    """Raises DataError: the file cannot be read, a line is no JSON object, or no line has a prompt."""
    found = False
    for where, values in json_lines(path):
        prompt = values.get("prompt")
        texts = prompt if isinstance(prompt, list) else [prompt]
        for text in texts:
            if isinstance(text, str):
                found = True
                yield RawRow(str(values.get("id", where)), text, "", None, where)
    if not found:
        raise DataError(f"{path}: no line has a prompt; a server logs prompts when it is started with log_prompts=true")
