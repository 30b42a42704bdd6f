"""JSON as the standard has it and nothing more: what the standard library lets through is refused here.

Duplicate keys, NaN and Infinity, deep nesting, endless numbers and lone surrogates each give one error that does not
repeat the text. All checks are linear in the text's length.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from .errors import ApiError, bad_request

MAX_DEPTH = 16
MAX_DIGITS = 64  # in a row: the longest number that any field takes has 20
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ENDLESS = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(body: bytes) -> Any:
    """The value that the body spells. Raises ApiError (400) for what is no JSON, or none that is taken here."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    bare = _STRING.sub(b'""', body)
    if _ENDLESS.search(bare):
        raise bad_request(f"the body holds a number of more than {MAX_DIGITS} digits")
    _check_depth(bare)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


def _check_depth(bare: bytes) -> None:
    """Innermost pairs are taken away until nothing is left; brackets without a partner are the parser's to refuse."""
    left = bare.translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        fewer = left.replace(b"[]", b"").replace(b"{}", b"")
        if not fewer or len(fewer) == len(left):
            return
        left = fewer
    raise _too_deep()


def _too_deep() -> ApiError:
    return bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise bad_request("the body has an object with the same key twice")
    return found


def _constant(name: str) -> Any:
    raise bad_request(f"{name} is no JSON number")


def _check_surrogates(value: Any) -> None:
    """An escape may spell half a character, which no encoding has."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise bad_request("the body holds a lone surrogate (\\ud800 to \\udfff), which is no character") from None
        return
    parts: Iterable[Any] = ()
    if isinstance(value, list):
        parts = value
    elif isinstance(value, dict):
        parts = [*value, *value.values()]
    for part in parts:
        _check_surrogates(part)
