"""Records of several runs of eval.peers as one: each case by the run that measured it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.errors import ConfigError, DataError

LABELS = (
    "ours", "against", "measure", "clock", "head", "shape", "dtype", "source_tokens", "batch", "threads", "rule",
    "trace",
)  # fmt: skip
STAMP = ("started", "wall_s", "argv", "config", "environment")


def merged(paths: Sequence[str]) -> dict[str, Any]:
    """``runs`` (where each part comes from), ``ratios``, ``cases`` and ``missing`` of all.

    Raises:
        DataError: a file that is no record of eval.peers.
        ConfigError: two runs measured the same.
    """
    found: dict[str, Any] = {"runs": [], "ratios": [], "cases": [], "missing": {}}
    known: dict[tuple[Any, ...], str] = {}
    for path in paths:
        summary = _read(Path(path))
        found["runs"].append({"record": path, **{name: summary[name] for name in STAMP}})
        for row in summary["ratios"]:
            key = tuple(row.get(name) for name in LABELS)
            if key in known:
                raise ConfigError(
                    f"{path} and {known[key]} both have {row['ours']} against {row['against']} at source "
                    f"{row['source_tokens']}, batch {row['batch']}; give one of them"
                )
            known[key] = path
        found["ratios"] += summary["ratios"]
        found["cases"] += summary["cases"]
        found["missing"] |= summary["missing"]
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if summary["program"] != "eval.peers":
            raise KeyError("program")
        summary["ratios"], summary["cases"], summary["missing"]  # noqa: B018
        return summary
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no summary.json of eval.peers ({error!r})") from None
