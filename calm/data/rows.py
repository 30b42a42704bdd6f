"""From raw rows of any origin to Examples: cleaning, the row policy, length filter, de-duplication, unique ids."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from ..config import DataConfig, RowPolicy
from ..errors import DataError
from ..records import Example
from .text import check_unicode, clean_text, has_control

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 20  # of one source or target; larger is no article but an accident
_NAMED = 5


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it was found; ``where`` is what an error message calls it (file:line, package, ...)."""

    id: str
    source: str | None
    target: str | None
    family: str | None = None  # None: the row's own text; "": it should have one and has none
    where: str = ""
    published: str | None = None  # train, validation or test, where the corpus came split


@dataclass
class Intake:
    """The rows that were kept and an account of all the others."""

    rows: list[Example] = field(default_factory=list)
    published: dict[str, list[Example]] = field(default_factory=dict)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cleaned: Counter[str] = field(default_factory=Counter)
    duplicate_ids: int = 0
    first_bad: dict[str, list[str]] = field(default_factory=dict)


def raw(examples: Iterable[Example]) -> Iterable[RawRow]:
    """Rows of a corpus of our own, which are already clean."""
    for row in examples:
        yield RawRow(row.id, row.source, row.target, row.family, row.id)


def take_in(rows: Iterable[RawRow], config: DataConfig, references: bool = True) -> Intake:
    """Clean and filter ``rows`` in one pass; what is dropped is counted by reason.

    Of equal (source, target) pairs the first stays. A repeated id gets a suffix, because traces and risk tables
    are joined by id.

    Args:
        references: whether rows must have targets.

    Raises:
        DataError: a lone surrogate or a text above 1 MiB (always); under ``data.row_policy=error`` one error for
            all rows with a null or empty field, with their number and the first ids.
    """
    intake = Intake()
    pairs: set[bytes] = set()
    ids: set[str] = set()
    for row in rows:
        intake.read += 1
        source = _field(row, row.source, "source", intake)
        target = _field(row, row.target, "target", intake) if references else ""
        if not source or target is None or not _named(row, intake):
            continue
        if config.min_source_words and len(source.split()) < config.min_source_words:
            intake.dropped[f"source below {config.min_source_words} words"] += 1
            continue
        pair = sha256(f"{source}\n{target}".encode()).digest()
        if pair in pairs:
            intake.dropped["duplicate pair"] += 1
            continue
        pairs.add(pair)
        example = Example(_unique(row.id, ids, intake), row.family or _row_family(source), source, target)
        if row.published is None:
            intake.rows.append(example)
        else:
            intake.published.setdefault(row.published, []).append(example)
    _judge(intake, config)
    return intake


def _row_family(source: str) -> str:
    """The family of a row that names none: its source, so that one text never lies in two splits."""
    return "row:" + sha256(source.encode()).hexdigest()[:24]


def _field(row: RawRow, text: str | None, name: str, intake: Intake) -> str | None:
    """The cleaned text; None, and a note in ``intake``, when the row has none."""
    if text is None:
        _bad(row, f"null {name}", intake)
        return None
    try:
        check_unicode(text)
    except DataError as error:
        raise DataError(f"{row.where}: {name}: {error}") from None
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise DataError(f"{row.where}: {name} has more than {MAX_TEXT_BYTES:,} bytes; cut the text or remove the row")
    cleaned = clean_text(text)
    if not cleaned:
        _bad(row, f"empty {name}", intake)
        return None
    if has_control(text):
        intake.cleaned[f"{name} with control characters, replaced by blanks"] += 1
    return cleaned


def _named(row: RawRow, intake: Intake) -> bool:
    """Whether the row's id and family can be used; a note in ``intake`` where the family is missing."""
    for name, value in (("id", row.id), ("family", row.family or "")):
        try:
            check_unicode(value)
        except DataError as error:
            raise DataError(f"{row.where}: {name}: {error}") from None
    if row.family == "":
        _bad(row, "null family", intake)
    return row.family != ""


def _bad(row: RawRow, reason: str, intake: Intake) -> None:
    intake.dropped[reason] += 1
    first = intake.first_bad.setdefault(reason, [])
    if len(first) < _NAMED:
        first.append(row.where if row.where.endswith(row.id) else f"{row.where} (id {row.id})")


def _unique(row_id: str, ids: set[str], intake: Intake) -> str:
    if row_id in ids:
        intake.duplicate_ids += 1
        n = 2
        while f"{row_id}#{n}" in ids:
            n += 1
        row_id = f"{row_id}#{n}"
    ids.add(row_id)
    return row_id


def _judge(intake: Intake, config: DataConfig) -> None:
    """Apply the row policy and say what was found."""
    if intake.first_bad:
        told = "; ".join(
            f"{intake.dropped[reason]:,} rows with {reason}, first at {', '.join(where)}"
            for reason, where in intake.first_bad.items()
        )
        if config.row_policy is RowPolicy.error:
            raise DataError(f"{config.name}: {told}; repair them, or leave them out with data.row_policy=skip")
        logger.warning("%s: left out %s", config.name, told)
    if intake.duplicate_ids:
        logger.warning("%s: %d rows repeat an id; each got a suffix", config.name, intake.duplicate_ids)
