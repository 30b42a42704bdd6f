"""When an answer ends, and how much of it may be shown."""

from collections.abc import Callable, Sequence

from .requests import Reason, Row

ToText = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # bytes of a character that the next token may complete


def end_of(row: Row, eos_token_id: int, to_text: ToText) -> Reason | None:
    """Why the row ends after its last token; None when it goes on. A stop string cuts the row's text."""
    token, options = row.tokens[-1], row.options
    if token == eos_token_id and not options.ignore_eos:
        return Reason.eos
    if token in options.stop_ids and row.step >= options.min_tokens:
        return Reason.stop
    if options.stop:
        text = to_text(row.tokens)
        if row.step < options.min_tokens:
            row.exempt = len(text.rstrip(UNFINISHED))
            return None
        found = (text.find(stop, max(0, row.exempt - len(stop) + 1)) for stop in options.stop)
        places = [place for place in found if place >= 0]
        if places:
            row.text = text[: min(places)]
            return Reason.stop
    return Reason.length if row.step >= row.limit else None


def visible_text(row: Row, to_text: ToText) -> str:
    """What of an answer can no longer change: without what may become a stop string or a character."""
    if row.text is not None:
        return row.text
    text = to_text(row.tokens)
    if row.over:
        return text
    text = text.rstrip(UNFINISHED)
    held = max((_overlap(text, stop) for stop in row.options.stop), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
