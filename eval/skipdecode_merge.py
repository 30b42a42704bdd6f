"""Records of eval.skipdecode on several corpora as one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.errors import ConfigError, DataError

STAMP = ("started", "wall_s", "argv", "config", "environment")
FOUND = (
    "articles",
    "num_layers",
    "measure",
    "paper",
    "noisy",
    "bleu",
    "code",
    "rows",
    "clocks",
    "pairs",
    "ablation",
    "slots",
)


def merged(paths: Sequence[str]) -> dict[str, Any]:
    """``corpora``: of each what its run found, and where that comes from.

    Raises:
        DataError: a file that is no record of eval.skipdecode on one corpus.
        ConfigError: two of one corpus.
    """
    corpora: dict[str, Any] = {}
    for path in paths:
        summary = _read(Path(path))
        corpus = str(summary["corpus"])
        if corpus in corpora:
            raise ConfigError(f"{path} and {corpora[corpus]['record']} are both of {corpus}; give one of them")
        corpora[corpus] = {
            "record": path,
            **{name: summary[name] for name in FOUND},
            "run": {name: summary[name] for name in STAMP},
        }
    return {"corpora": corpora}


def _read(path: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if summary["program"] != "eval.skipdecode" or missing(summary):
            raise KeyError(*missing(summary))
        return summary
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no summary.json of eval.skipdecode on a corpus ({error!r})") from None


def missing(summary: dict[str, Any]) -> list[str]:
    """What a record of one corpus has and this one lacks."""
    return [name for name in ("corpus", *FOUND, *STAMP) if name not in summary]
