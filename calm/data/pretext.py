"""Pairs for a pretext task, made from a corpus' own sources: what a model from scratch learns before the real pairs.

From short targets alone a model has to learn English, copying and choosing at once. Longer targets over the same texts
teach the first two sooner. Families stay, so every pair lies in the split in which its row lay.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from ..config import Pretext
from ..records import Example

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_FIRST_WORDS = range(5, 31)  # of a first sentence that is worth writing
_REST_WORDS = 10  # of a text that is worth reading
_LEAD = slice(1, 10)


def gap_sentences(rows: Iterable[Example]) -> Iterator[Example]:
    """Two pairs for each text of more than one sentence: ``gap`` and ``lead``.

    ``gap``: the text without its first sentence -> that sentence (gap sentences as in PEGASUS, Zhang et al. 2020).
    ``lead``: the whole text -> words 2 to 10 of its first sentence, which can be copied.
    """
    for row in rows:
        first, *rest = _SENTENCE_END.split(row.source, maxsplit=1)
        words = first.split()
        if rest and len(words) in _FIRST_WORDS and len(rest[0].split()) >= _REST_WORDS:
            yield Example(f"{row.id}/gap", row.family, rest[0], first)
            yield Example(f"{row.id}/lead", row.family, row.source, " ".join(words[_LEAD]))


MAKERS: dict[Pretext, Callable[[Iterable[Example]], Iterator[Example]]] = {Pretext.gap_sentences: gap_sentences}
