"""A small corpus in the form in which debian is brought along to a machine without a mirror."""

from pathlib import Path

from calm.data import debian, restaurants
from calm.data.cache import cached_rows
from calm.records import Example
from eval.gpu_corpus import pack


def rows(count: int) -> list[Example]:
    """Of families of their own; long enough to be kept."""
    facts = list(restaurants.rows(count + 1, 3))
    return [
        Example(f"p{i}", f"p{i}", f"{here.target} {after.target} {here.source} number {i}", f"{here.target} {i}")
        for i, (here, after) in enumerate(zip(facts, facts[1:], strict=False))
    ]


def carry(folder: Path, work: Path, count: int = 600) -> Path:
    """The packed corpus; ``work`` takes the caches that it is made of."""
    info = {"release": "made up"}
    found, _ = cached_rows(work, debian.KEY, lambda told: (told.update(info), rows(count))[1])
    pack(found, info, folder, work)
    return folder
