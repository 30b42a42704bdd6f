"""Which row belongs to which split: by the hash of its family, so no family and no text is in two of them.

dev, calibration and test hold one row per family (exchangeable rows for the certificate) in the order of their
hashes, so that the first n of them are a random sample and a longer corpus moves no row to another split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from ..config import SplitConfig
from ..errors import DataError
from ..records import Example

SPLITS = ("train", "dev", "calibration", "test")
_PROTECTED = ("test", "calibration", "dev", "train")  # who keeps a text that two splits have


def share(key: str) -> float:
    """A number in [0, 1) that depends on ``key`` alone."""
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") / 2.0**64


def split_of(family: str, config: SplitConfig) -> str:
    """The split of a family: a hash against the configured shares."""
    position = share(family)
    for name in ("test", "calibration", "dev"):
        position -= getattr(config, name)
        if position < 0:
            return name
    return "train"


def published_split_of(published: str, family: str, config: SplitConfig) -> str:
    """train and test as published; validation is shared by dev and calibration in their configured proportion."""
    if published != "validation":
        return published
    position = share(family)
    return "dev" if position < config.dev / (config.dev + config.calibration) else "calibration"


def one_per_family(rows: Sequence[Example]) -> list[Example]:
    """The row of least hash of each family, ordered by the families' hashes."""
    chosen: dict[str, tuple[bytes, Example]] = {}
    for row in rows:
        rank = sha256(f"{row.source}\n{row.target}".encode()).digest()
        if row.family not in chosen or rank < chosen[row.family][0]:
            chosen[row.family] = (rank, row)
    return [chosen[family][1] for family in sorted(chosen, key=lambda name: sha256(name.encode()).digest())]


def sample(rows: Sequence[Example], n: int | None) -> list[Example]:
    """At most ``n`` rows, those of least hash, in their old order."""
    if n is None or len(rows) <= n:
        return list(rows)
    ranked = sorted(range(len(rows)), key=lambda i: (sha256(rows[i].id.encode()).digest(), i))
    return [rows[i] for i in sorted(ranked[:n])]


def drop_shared(splits: Mapping[str, list[Example]]) -> tuple[dict[str, list[Example]], dict[str, int]]:
    """Leave a source text or a family that two splits have in the more protected one; count what the others lost."""
    texts: set[str] = set()
    families: set[str] = set()
    kept, lost = {}, {}
    for name in _PROTECTED:
        if name in splits:
            kept[name] = [row for row in splits[name] if row.source not in texts and row.family not in families]
            lost[name] = len(splits[name]) - len(kept[name])
            texts.update(row.source for row in splits[name])
            families.update(row.family for row in splits[name])
    return {name: kept[name] for name in SPLITS if name in kept}, {name: n for name, n in lost.items() if n}


@dataclass(frozen=True, slots=True)
class Overlap:
    """What several splits share: numbers of families and of source texts, and the first few of them."""

    families: int
    texts: int
    examples: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.families or self.texts)

    def __str__(self) -> str:
        told = f"{self.families} families and {self.texts} source texts lie in more than one split"
        return told + (f", such as {', '.join(self.examples)}" if self.examples else "")


def check_overlap(splits: Mapping[str, Sequence[Example]]) -> Overlap:
    """Families and source texts that are in more than one of ``splits``; falsy when there are none."""
    counts = []
    examples: list[str] = []
    for attribute in ("family", "source"):
        owner: dict[str, str] = {}
        shared: dict[str, str] = {}
        for name, rows in splits.items():
            for row in rows:
                value = getattr(row, attribute)
                if owner.setdefault(value, name) != name:
                    shared.setdefault(value, f"{attribute} {value[:60]!r} ({owner[value]}, {name})")
        counts.append(len(shared))
        examples += list(shared.values())[:3]
    return Overlap(counts[0], counts[1], tuple(examples))


def content_hash(rows: Sequence[Example]) -> str:
    """sha256 over ids, families and texts, in order."""
    digest = sha256()
    for row in rows:
        for value in (row.id, row.family, row.source, row.target):
            digest.update(value.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def refuse_empty(splits: Mapping[str, Sequence[Example]], wanted: Sequence[str], name: str, families: int) -> None:
    """Raise DataError when a wanted split has no row."""
    empty = [split for split in wanted if not splits.get(split)]
    if empty:
        raise DataError(
            f"{name}: no row is left for {', '.join(empty)} ({families} families in all); "
            f"give more rows or a larger data.split.{empty[0] if empty[0] != 'train' else 'dev'}"
        )
