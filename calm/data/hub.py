"""Published corpora: CNN/DailyMail, XSum, E2E NLG; from the hub, or from a local copy of their Parquet files.

Their splits stay as published: train trains, test tests, and validation is shared by dev and calibration by the
hash of the family. ``datasets`` enters the project here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..config import DataConfig
from ..errors import DataError
from .files import Columns, read_parquet, user_path
from .rows import RawRow

logger = logging.getLogger(__name__)

OFFLINE = "restaurants, debian, pydoc, jsonl, parquet"
_CONNECT_S = 5.0
_CONVERTED = "refs/convert/parquet"  # where the hub keeps Parquet of corpora that were published as scripts


@dataclass(frozen=True)
class Published:
    """Where a corpus is on the hub; ``config`` is also the folder of its Parquet files."""

    repository: str
    config: str


CORPORA = {
    "cnn_dailymail": Published("abisee/cnn_dailymail", "3.0.0"),
    "xsum": Published("EdinburghNLP/xsum", "default"),
    "e2e_nlg": Published("tuetschek/e2e_nlg", "default"),
}


def rows(config: DataConfig, wanted: Sequence[str], info: dict[str, str]) -> Iterator[RawRow]:
    """Rows of the published splits: test, validation, and train where it is wanted.

    The evaluation splits come first, so that of equal pairs theirs are kept.

    Raises:
        DataError: no hub and no local copy (it names the corpora that need neither), or an unusable file.
    """
    published = ["test", "validation"] + (["train"] if "train" in wanted else [])
    if config.path:
        info["origin"] = f"local Parquet; validation is split into dev and calibration ({config.path})"
        yield from _local(config, published)
        return
    info["origin"] = f"hub {CORPORA[config.name].repository}; validation is split into dev and calibration"
    yield from _downloaded(config, published)


def _local(config: DataConfig, published: Sequence[str]) -> Iterator[RawRow]:
    """From ``data.path``: the repository's folder, or the one with the ``train-*.parquet`` files."""
    folder = user_path(str(config.path))
    if not folder.is_dir():
        raise DataError(f"data.path={folder}: there is no such folder; it should hold {config.name}'s Parquet files")
    candidates = [folder, folder / CORPORA[config.name].config, folder / "data"]
    for split in published:
        files = next((found for base in candidates if (found := sorted(base.glob(f"{split}-*.parquet")))), [])
        files = files or next(([f] for base in candidates if (f := base / f"{split}.parquet").is_file()), [])
        if not files:
            raise DataError(f"data.path={folder}: no {split}-*.parquet there, nor in {CORPORA[config.name].config}/")
        for file in files:
            for row in read_parquet(file, Columns.of(config)):
                yield _published(row, split)


def _published(row: RawRow, split: str) -> RawRow:
    return RawRow(row.id, row.source, row.target, row.family, row.where, split)


def _unreachable(config: DataConfig, reason: str) -> DataError:
    where = CORPORA[config.name].repository
    return DataError(
        f"data={config.name} needs the hub ({where}) or a local copy: {reason}; "
        f"set data.path to a folder with its Parquet files, or choose an offline corpus: {OFFLINE}"
    )


def hub_answers(endpoint: str) -> bool:
    """Whether the hub's address takes a connection within seconds; a proxy, where one is set, is asked instead."""
    scheme = urlsplit(endpoint).scheme
    proxy = os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY")
    target = urlsplit(proxy or endpoint)
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        socket.create_connection((target.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _downloaded(config: DataConfig, published: Sequence[str]) -> Iterator[RawRow]:
    """From the hub, or from the local cache of ``datasets`` when the hub does not answer."""
    from huggingface_hub import constants

    answers = not constants.is_offline_mode() and hub_answers(constants.ENDPOINT)
    if not answers:
        logger.info("the hub does not answer or HF_HUB_OFFLINE is set; looking into the local cache")
    with nullcontext() if answers else _offline():
        tables = [_load(config, split, answers) for split in published]
    columns = Columns.of(config)
    for split, table in zip(published, tables, strict=True):
        missing = [(column, key) for _, column, key in columns.named() if column not in table.column_names]
        if missing:
            column, key = missing[0]
            raise DataError(
                f"{config.name}: no column {column!r}; available: {', '.join(table.column_names)}; set {key}"
            )
        for number, values in enumerate(table):
            where = f"{config.name} {split}: row {number}"
            text = {name: values[column] for name, column, _ in columns.named()}
            row_id = str(text.get("id") or f"{split}-{number}")
            yield RawRow(row_id, text["source"], text["target"], text.get("family"), where, split)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep ``datasets`` from trying the network again and again: its retries take minutes."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _load(config: DataConfig, split: str, answers: bool) -> Any:
    """One published split as a memory-mapped table of ``datasets``."""
    import datasets

    known = CORPORA[config.name]

    def load(revision: str | None) -> Any:
        return datasets.load_dataset(known.repository, known.config, split=split, revision=revision)

    try:
        try:
            return load(None)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            return load(_CONVERTED)
    except Exception as error:  # datasets raises of many kinds when a hub or a cache is missing
        reason = _first_line(error) if answers else "the hub does not answer and the local cache has no copy"
        raise _unreachable(config, reason) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
