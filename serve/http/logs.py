"""Logs: one JSON object a line on stderr. No prompt, no key, no header of a client's, no line within a line."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("calm.serve")


class JsonLines(logging.Formatter):
    """A record as one line: time, level, what happened, and the facts that came with it as ``extra={"facts": {...}}``.

    Of an exception it tells the kind and the places in the code: its message may hold what a client sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["at"] = [
                f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_tb(error.__traceback__)
            ]
        return json.dumps(line, default=str)  # ASCII: nothing in it moves a terminal's cursor


def log_to_stderr(level: int = logging.INFO) -> None:
    """Every logger of the process, the web server's included, writes such lines and nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(max(level, logging.WARNING))  # that it has started and stopped is told here


def log_failure(what: str, error: BaseException | None = None) -> None:
    """Something that is the server's own fault."""
    LOGGER.error(what, exc_info=error)


def log_request(facts: dict[str, Any]) -> None:
    """The one line of a request that is over."""
    LOGGER.info("request", extra={"facts": facts})
