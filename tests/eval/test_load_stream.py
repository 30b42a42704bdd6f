"""Server-sent events out of bytes cut anywhere, and what a completions stream says and when."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.load_stream import MAX_BODY_BYTES, MAX_EVENT_BYTES, MESSAGE_CHARS, Completion, Events, Malformed, Reply, short

STREAM = {b"content-type": b"text/event-stream; charset=utf-8"}
CHUNK = {"choices": [{"index": 0, "text": "a"}]}


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(*parts: bytes, status: int = 200) -> Completion:
    """Fed part by part, at times 1, 2, 3, ..."""
    found = Completion()
    found.head(status, STREAM)
    for at, part in enumerate(parts, 1):
        found.data(float(at), part)
    return found


MIXED = (
    b": a comment\r\nevent: x\r\ndata: one\r\n\r\n"
    b"data:two\ndata:  lines\n\nid: 3\n\n"
    b"data: caf\xc3\xa9 \xf0\x9f\x99\x82\r\rretry: 5\n\ndata: [DONE]\n\n"
)
EVENTS = ["one", "two\n lines", "café 🙂", "[DONE]"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(MIXED)), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    events, bounds = Events(), [0, *sorted(cuts), len(MIXED)]
    found = [event for a, b in zip(bounds, bounds[1:], strict=False) for event in events.feed(MIXED[a:b])]
    assert found == EVENTS


def test_events_come_when_they_are_whole_and_not_before() -> None:
    events = Events()
    assert events.feed(b"data: a") == [] and events.feed(b"b\n") == []
    assert events.feed(b"\ndata: c\n\nda") == ["ab", "c"]


def test_what_is_no_text_and_what_has_no_end_is_malformed() -> None:
    with pytest.raises(Malformed, match="UTF-8"):
        Events().feed(b"data: \xff\n\n")
    for piece in (b"x" * 100_000, b"data: " + b"x" * 100_000 + b"\n"):  # one line, or many lines of one event
        events = Events()
        with pytest.raises(Malformed, match=f"more than {MAX_EVENT_BYTES}"):
            for _ in range(2 * MAX_EVENT_BYTES // 100_000):
                events.feed(piece)


def test_times_are_those_of_chunks_with_choices() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 4}}
    empty = {"choices": [{"text": ""}], "usage": None}
    found = completion(data(CHUNK), data(empty) + data(CHUNK), b": ping\n\n", data(usage), b"data: [DONE]\n\n")
    found.check()
    assert found.chunks == [1.0, 2.0, 2.0]  # text may be empty; usage and [DONE] do not count
    assert (found.tokens, found.prompt_tokens, found.text, found.done) == (7, 4, "aa", True)


def test_a_chunk_counts_when_its_last_byte_has_come() -> None:
    whole = data(CHUNK)
    assert completion(whole[:10], whole[10:-1], whole[-1:], b"data: [DONE]\n\n").chunks == [3.0]


def test_usage_may_stand_in_any_chunk_or_be_left_out() -> None:
    running = [data({**CHUNK, "usage": {"completion_tokens": n, "prompt_tokens": 2}}) for n in (1, 2, 3)]
    assert completion(*running).tokens == 3
    assert completion(data(CHUNK)).tokens is None


def test_what_a_server_of_ours_tells_of_layers_stands_with_the_last_words() -> None:
    facts = {"certified": True, "tokens": 3, "mean_exit_layer": 2.5, "layers_skipped": 0.6875}
    last = {"choices": [{"text": "", "finish_reason": "stop", "early_exit": facts}]}
    assert completion(data(CHUNK), data(last)).early_exit == facts
    assert completion(data(CHUNK)).early_exit == {}
    assert completion(data({"choices": [{"early_exit": 7}]})).early_exit == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"data: {not json}\n\n", "no JSON"),
        (b"data: 7\n\n", "no JSON object"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "no JSON"),
        (data({"choices": 7}), "choices"),
        (data({"choices": [7]}), "choices"),
        (data({"usage": {"completion_tokens": -1}}), "completion_tokens is no count"),
        (data({"usage": {"completion_tokens": True}}), "completion_tokens is no count"),
        (data({"usage": {"prompt_tokens": 1.5}}), "prompt_tokens is no count"),
    ],
)
def test_what_no_completions_server_says_is_malformed(body: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        completion(body)


def test_a_stream_is_whole_with_choices_and_done() -> None:
    with pytest.raises(Malformed, match="without any choices"):
        completion(b"data: [DONE]\n\n").check()
    with pytest.raises(Malformed, match=r"without \[DONE\]"):
        completion(data(CHUNK)).check()
    with pytest.raises(Malformed, match="application/json instead of a stream"):
        Completion().head(200, {b"content-type": b"application/json"})
    with pytest.raises(Malformed, match="a body without a type"):
        Completion().head(200, {})


def test_errors_are_told_in_one_short_line() -> None:
    assert completion(data({"error": {"message": "it\nbroke", "code": 500}})).failure == "it broke"
    assert completion(data({"error": "plain"})).failure == "plain"
    for body, told in (
        (b'{"error": {"message": "no\\n such model"}}', "no such model"),
        (b'{"error": "text"}', "text"),
        (b'{"object": "error", "message": "flat"}', "flat"),
        (b"<html>\n Bad Gateway", "<html> Bad Gateway"),
        (b"\xff", "\ufffd"),
        (b"[1]", "[1]"),
        (b"", ""),
    ):
        assert completion(body, status=404).message == told
    assert len(short("x" * 1000)) == MESSAGE_CHARS and short("x" * MESSAGE_CHARS).endswith("x")


def test_a_body_without_end_is_malformed() -> None:
    reply = Reply()
    reply.head(200, {})
    reply.data(0.0, b"x" * MAX_BODY_BYTES)
    with pytest.raises(Malformed, match="a body of more"):
        reply.data(0.0, b"x")
