"""An engine whose answers are known beforehand: ids are syllables of a story (tests.scripted)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from serve.engine import Engine
from serve.model import ServedModel, served
from tests.scripted import early_exit, scripted

SYLLABLES = {5: "one ", 6: "two th", 7: "ree", 8: " four", 9: " nine", 10: "ten ", 11: "eleven", 12: "twelve"}
ONE = (5, 6, 7, 8, 1)  # what "w3" is answered with: "one two three four"
TEN = (10, 11, 1)  # what "w4" is answered with: "ten eleven"
LENGTH = 7


def spell(ids: Sequence[int]) -> str:
    return "".join(SYLLABLES.get(token, "") for token in ids)


@cache
def story_model() -> ServedModel:
    return replace(served(early_exit(scripted(), length=LENGTH)), to_text=spell)


def story_engine(**options: Any) -> Engine:
    return Engine(story_model(), **{"max_batch": 4, "poison": True, **options})
