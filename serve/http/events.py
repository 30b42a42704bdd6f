"""Server-sent events: one line of JSON each, and a blank line."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in between shall not collect them
]


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """An event that holds this object. JSON escapes the line breaks in its strings, so it stays one line."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
