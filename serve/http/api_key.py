"""The key that clients have to send: from the environment or a file, never from a command line, which ``ps`` shows."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from calm.errors import ConfigError

VARIABLE = "CALM_API_KEY"
LONGEST = 512


def read_key(file: str | None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """The key; None where none is set. The variable is taken out, so that no process started from here inherits it.

    Raises:
        ConfigError: both are given, the file cannot be read, or the key cannot stand in a header.
    """
    given = environment.pop(VARIABLE, None)
    if given is not None and file is not None:
        raise ConfigError(f"{VARIABLE} and api_key_file= exclude each other: give one of them")
    if given is None and file is None:
        return None
    where = VARIABLE if file is None else f"api_key_file={file}"
    key = (given if given is not None else _read(Path(file or ""))).strip()
    if not key:
        raise ConfigError(f"{where} is empty; give a key, or nothing to let everybody in")
    if len(key) > LONGEST or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"{where}: a key has at most {LONGEST} visible ASCII characters and no blanks")
    return key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"api_key_file={path} cannot be read as text; give a file that holds the key") from None
