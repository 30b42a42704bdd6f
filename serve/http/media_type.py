"""Which bodies are read at all: plain JSON in UTF-8."""

import re
from collections.abc import Iterable

from .errors import ApiError

_JSON = re.compile(rb'application/json\s*(?:;\s*charset\s*=\s*"?utf-8"?\s*)?', re.IGNORECASE)


def check_media_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError (415) unless the body is declared as JSON, once, and in no encoding."""
    types = [value for name, value in headers if name == b"content-type"]
    encodings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    if len(types) != 1 or not _JSON.fullmatch(types[0].strip()):
        raise ApiError(415, "send the body as content-type: application/json")
    if any(encoding != b"identity" for encoding in encodings):
        raise ApiError(415, "send the body without content-encoding")
