"""Fault 39, and the JSON part of faults 26 and 28: what is no JSON, or more than JSON, is one clear 400."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.http.errors import ApiError
from serve.http.strict_json import MAX_DEPTH, MAX_DIGITS, strict_json

MB = 2**20
DEPTH = f"deeper than {MAX_DEPTH} levels"
NOT_JSON = "the body is not JSON"
REFUSED = {
    "nothing": (b"", NOT_JSON),
    "cut off": (b'{"prompt": "a', NOT_JSON),
    "cut off in an escape": (b'"\\', NOT_JSON),
    "two values": (b"{} {}", NOT_JSON),
    "a comma too many": (b"[1,]", NOT_JSON),
    "single quotes": (b"{'a': 1}", NOT_JSON),
    "byte order mark": (b"\xef\xbb\xbf{}", NOT_JSON),
    "crossed brackets": (b"[{]}", NOT_JSON),
    "control character in a string": (b'"\x00"', NOT_JSON),
    "latin-1": (b'{"a": "\xe9"}', "not UTF-8"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "an encoded surrogate": (b'"\xed\xa0\x80"', "not UTF-8"),
    "lone surrogate": (b'{"a": ["\\ud800"]}', "lone surrogate"),
    "lone low surrogate in a key": (b'{"\\uDC00": 1}', "lone surrogate"),
    "twice the same key": (b'{"a": 1, "b": 2, "a": 1}', "the same key twice"),
    "the same key in two spellings": (b'{"a": 1, "\\u0061": 1}', "the same key twice"),
    "twice the same key further in": (b'[{"a": {"b": 1, "b": 1}}]', "the same key twice"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "infinity": (b"[Infinity]", "Infinity"),
    "minus infinity": (b"-Infinity", "-Infinity"),
    "endless integer": (b"9" * 5000, f"more than {MAX_DIGITS} digits"),
    "endless fraction": (b"0." + b"1" * 5000, f"more than {MAX_DIGITS} digits"),
    "one level too deep": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), DEPTH),
    "objects too deep": (b'{"a":' * 40 + b"1" + b"}" * 40, DEPTH),
    "deep and closed": (b"[" * 10**5 + b"]" * 10**5, DEPTH),
    "deep and open": (b"[" * 10**5, DEPTH),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_strict_json_is_one_400_that_does_not_repeat_it(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(ApiError, match=said) as caught:
        strict_json(body)
    assert caught.value.status == 400 and "\n" not in caught.value.message
    assert len(caught.value.message) < 120


HOSTILE = {
    "deep": b"[" * (MB // 2) + b"]" * (MB // 2),
    "wide": b"[" + b"[]," * (MB // 3) + b"[]]",
    "quotes": b'"' + b'\\"' * (MB // 2),
    "odd quotes": b'"\\' * (MB // 2),
    "keys": b"{" + b",".join(b'"%d":1' % number for number in range(MB // 12)) + b"}",
    "backslashes": b'"' + b"\\\\" * (MB // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_takes_long(name: str) -> None:
    """The time is linear in the size: a quarter of it takes less than half of the time, or next to nothing."""

    def spent(body: bytes) -> float:
        times = []
        for _ in range(3):
            begun = time.thread_time()
            try:
                strict_json(body)
            except ApiError:
                pass
            times.append(time.thread_time() - begun)
        return min(times)

    body = HOSTILE[name]
    whole, quarter = spent(body), spent(body[: len(body) // 4])
    assert whole < 1.0
    assert whole < 0.02 or quarter < whole


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_json_is_read_as_the_standard_library_reads_it(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    depth = 0 if not isinstance(value, list | dict) else depth_of(value)
    if depth <= MAX_DEPTH:
        assert strict_json(body) == value


def depth_of(value: Any) -> int:
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if parts is None else 1 + max((depth_of(part) for part in parts), default=0)


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_any_bytes_are_a_value_or_a_400(body: bytes) -> None:
    try:
        strict_json(body)
    except ApiError as error:
        assert error.status == 400


def test_the_deepest_that_is_taken() -> None:
    assert depth_of(strict_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)) == MAX_DEPTH
    assert strict_json(b'"[[[[[[[[[[[[[[[[[[[[[[[[[[[["') == "[" * 28
    assert strict_json(b'"\\ud83d\\ude42"') == "🙂"
