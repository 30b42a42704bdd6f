"""Between text and token ids: normalising, encoding, truncating, decoding. Pure; knows no corpus and no file.

Text typed by a user never becomes a control token: ``</s>``, ``<pad>`` and ``<extra_id_0>`` in a source are
encoded as the characters that they are. Nothing disappears silently on the way back either: a token that has
no text (unknown, or an id above the vocabulary) decodes to U+FFFD.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from ..errors import DataError

REPLACEMENT = "\ufffd"
IGNORED_LABEL = -100  # the padding of labels in torch's cross-entropy
KNOWN = "_calm_known"  # attribute of a tokenizer: texts whose ids were made before (calm.data.tokenised)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")


@runtime_checkable
class SourceSettings(Protocol):
    """What encode_source needs: DataConfig and EarlyExitSettings both have it."""

    @property
    def max_source_tokens(self) -> int: ...
    @property
    def source_prefix(self) -> str: ...
    @property
    def truncate(self) -> Any: ...  # "head" or "head_tail"


def clean_text(text: str) -> str:
    """NFC, control characters to blanks, runs of white space to one blank, no blanks at the ends."""
    if not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    return " ".join(_CONTROL.sub(" ", text).split())


def has_control(text: str) -> bool:
    """True when ``clean_text`` would replace a NUL or another control character that is no white space."""
    return _CONTROL.search(text) is not None


def check_unicode(text: str) -> None:
    """Raise DataError for a lone surrogate, which no tokenizer and no file can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: "
            "it is no valid Unicode; repair the text"
        ) from None


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of ``text`` as plain text, without EOS; never a control id.

    The ordinary path is the backend's own. Only where a control id came out of it (the text spells a control
    token, which hub vocabularies hold as a piece) the text is taken through the backend's parts by hand, cutting
    each spelt token after its first character. ``split_special_tokens=True`` would not do: it keeps the added
    tokens from matching but not a Unigram vocabulary that has the same string as a piece.

    Raises:
        DataError: lone surrogate.
    """
    check_unicode(text)
    known = getattr(tokenizer, KNOWN, None)
    made_before: list[int] | None = None if known is None else known.get(text)
    if made_before is not None:
        return made_before
    backend = tokenizer.backend_tokenizer
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    if _control_ids(tokenizer).isdisjoint(ids):
        return ids
    pattern = re.compile("|".join(re.escape(token) for token in sorted(_control_tokens(tokenizer), reverse=True)))
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
    pieces = (
        backend.pre_tokenizer.pre_tokenize_str(normalized) if backend.pre_tokenizer is not None else [(normalized,)]
    )
    return [token.id for piece in pieces for part in _cut(piece[0], pattern) for token in backend.model.tokenize(part)]


def _cut(piece: str, pattern: re.Pattern[str]) -> Iterable[str]:
    """Cut ``piece`` inside every control token that it spells: ``a</s>b`` gives ``a<`` and ``/s>b``."""
    start = 0
    for match in pattern.finditer(piece):
        yield piece[start : match.start() + 1]
        start = match.start() + 1
    yield piece[start:]


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(_control_ids(tokenizer)))]


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that text must not reach; unk is one of them because ``<unk>`` can be spelt too."""
    cached: frozenset[int] | None = getattr(tokenizer, "_calm_control_ids", None)
    if cached is None:
        special = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        cached = frozenset([*tokenizer.all_special_ids, *special])  # a GGUF's tokenizer names only some of them
        tokenizer._calm_control_ids = cached
    return cached


def truncate_ids(ids: Sequence[int], budget: int, how: str) -> list[int]:
    """At most ``budget`` ids: the first ones (``head``), or first two thirds and last third (``head_tail``)."""
    if len(ids) <= budget:
        return list(ids)
    if how == "head":
        return list(ids[:budget])
    if how != "head_tail":
        raise DataError(f"truncate must be head or head_tail, got {how!r}")
    head = -(-2 * budget // 3)
    tail = budget - head
    return [*ids[:head], *ids[len(ids) - tail :]]


def encode_source(
    tokenizer: PreTrainedTokenizerBase, text: str, settings: SourceSettings, *, cut: bool = True
) -> list[int]:
    """Prefix + text between what the model's settings put around it, truncated to ``max_source_tokens`` ids in all.

    Without settings of their own (those of a corpus) texts end with EOS, as a T5's do.

    Raises:
        DataError: lone surrogate; a text that is longer, where it may not be ``cut``; no room for any text.
    """
    ids = text_ids(tokenizer, settings.source_prefix + text)
    start, end = list(getattr(settings, "source_start", ())), getattr(settings, "source_end", None)
    end = [tokenizer.eos_token_id] if end is None else list(end)
    around = len(start) + len(end)
    if around > settings.max_source_tokens:
        raise DataError(
            f"max_source_tokens={settings.max_source_tokens} is less than the {around} tokens that stand around a "
            "source"
        )
    if not cut and len(ids) + around > settings.max_source_tokens:
        raise DataError(
            f"the text has {len(ids) + around} tokens, the model takes {settings.max_source_tokens}; shorten it, or "
            "let it be cut (truncate=true)"
        )
    how = getattr(settings.truncate, "value", settings.truncate)
    return [*start, *truncate_ids(ids, settings.max_source_tokens - around, how), *end]


def encode_target(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> list[int]:
    """At most ``max_tokens`` ids, EOS the last of them; a longer text loses its end.

    Raises:
        DataError: lone surrogate.
    """
    return [*text_ids(tokenizer, text)[: max_tokens - 1], tokenizer.eos_token_id]


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """Text of ``ids``. Control tokens and -100 are left out; what has no text becomes U+FFFD, never nothing.

    Raises:
        DataError: a negative id other than -100.
    """
    known, kept = _pieces(tokenizer), []
    for index in map(int, ids):
        if index >= 0:
            piece = known.get(index, REPLACEMENT)
            if piece is not None:
                kept.append(piece)
        elif index != IGNORED_LABEL:
            last = len(tokenizer) - 1
            raise DataError(f"cannot decode token id {index}: ids are 0..{last}, or -100 for ignored labels")
    decoder = tokenizer.backend_tokenizer.decoder
    return str(decoder.decode(kept)) if decoder is not None else " ".join(kept)


def _pieces(tokenizer: PreTrainedTokenizerBase) -> dict[int, str | None]:
    """What each id says, None where that is nothing. Kept: who streams decodes an answer anew with every token."""
    cached: dict[int, str | None] | None = getattr(tokenizer, "_calm_pieces", None)
    if cached is None:
        every = range(len(tokenizer))
        said = (REPLACEMENT if piece is None else str(piece) for piece in tokenizer.convert_ids_to_tokens(list(every)))
        cached = {**dict(zip(every, said, strict=True)), **dict.fromkeys(_control_ids(tokenizer))}
        if tokenizer.unk_token_id is not None:
            cached[tokenizer.unk_token_id] = REPLACEMENT
        tokenizer._calm_pieces = cached
    return cached
