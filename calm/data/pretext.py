"""Pairs for a pretext task, made from a corpus of (source, target) rows: what a model learns before the real pairs.

A model from scratch has to learn English, copying and choosing at once from short targets. Longer or easier targets
over the same texts teach the first two sooner. Families stay, so rows lie in the splits in which they lay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from ..config import Pretext
from ..records import Example

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_FIRST_WORDS = range(5, 31)  # of a first sentence that is taken for a gap
_REST_WORDS = 10  # that must stay
_SPAN_HEAD, _SPAN_WORDS, _SPAN_F = 60, 14, 0.4
_WORD = re.compile(r"[a-z0-9]+")


def gap_sentences(rows: Iterable[Example]) -> Iterator[Example]:
    """The text without its first sentence -> that sentence (the gap sentences of PEGASUS, Zhang et al. 2020)."""
    for row in rows:
        first, *rest = _SENTENCE.split(row.source, maxsplit=1)
        if rest and len(first.split()) in _FIRST_WORDS and len(rest[0].split()) >= _REST_WORDS:
            yield Example(f"{row.id}/gap", row.family, rest[0], first)


def spans(rows: Iterable[Example]) -> Iterator[Example]:
    """The text -> its run of at most 14 words, among its first 60, that shares most words with the target (F1).

    Rows whose best run has an F1 below 0.4 are left out. A teacher that only ever points: what it says is always
    in the source.
    """
    for row in rows:
        score, span = closest_span(row.source, row.target)
        if score >= _SPAN_F:
            yield Example(f"{row.id}/span", row.family, row.source, span)


def closest_span(source: str, target: str) -> tuple[float, str]:
    """Largest F1 of words between a run of source words and the target, and the shortest such run, trimmed of
    punctuation; (0, "") when they share no word. Repeated words count once per occurrence in the run, at most as
    often as the target is long.
    """
    words = source.split()[:_SPAN_HEAD]
    wanted = _WORD.findall(target.lower())
    known = set(wanted)
    parts = [_WORD.findall(word.lower()) for word in words]
    sizes = list(accumulate((len(part) for part in parts), initial=0))
    hits = list(accumulate((sum(one in known for one in part) for part in parts), initial=0))
    best, begin, end = 0.0, 0, 0
    for length in range(1, min(_SPAN_WORDS, len(words)) + 1):
        for start in range(len(words) - length + 1):
            hit = min(hits[start + length] - hits[start], len(wanted))
            score = 2.0 * hit / max(sizes[start + length] - sizes[start] + len(wanted), 1)
            if score > best:
                best, begin, end = score, start, start + length
    return best, " ".join(words[begin:end]).strip(" .,;:()")


MAKERS: dict[Pretext, Callable[[Iterable[Example]], Iterator[Example]]] = {
    Pretext.gap_sentences: gap_sentences,
    Pretext.spans: spans,
}
