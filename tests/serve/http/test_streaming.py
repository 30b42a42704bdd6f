"""POST /v1/completions as server-sent events: their framing, what joins to what, and how a stream ends."""

import asyncio
import json
from typing import Any

import pytest

from calm.errors import DataError
from serve.http.backend import Source
from serve.options import RequestOptions
from serve.requests import Reason

from .fakes import NAME, FakeEngine, Script, said_of
from .running import app_of, complete, error_of, events_of


def chunks(engine: FakeEngine | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The objects of a stream that ends as it should."""
    response = complete(app_of(engine), stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    events = events_of(response.text)
    assert events[-1] == (None, "[DONE]") and all(name is None for name, _ in events)
    return [content for _, content in events[:-1]]


def texts(parts: list[dict[str, Any]]) -> dict[int, str]:
    """Joined text by index; each index has to end exactly once, and last."""
    found: dict[int, str] = {}
    ended = set()
    for part in parts:
        for choice in part["choices"]:
            assert choice["index"] not in ended
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    assert ended == set(found)
    return found


def test_chunks_have_openais_form_and_the_last_one_of_an_index_says_how_early_it_was() -> None:
    parts = chunks(prompt="hello")
    assert {part["object"] for part in parts} == {"text_completion"}
    assert {part["model"] for part in parts} == {NAME} and len({part["id"] for part in parts}) == 1
    assert all("usage" not in part for part in parts)
    *before, last = [choice for part in parts for choice in part["choices"]]
    assert all(choice["finish_reason"] is None and "early_exit" not in choice for choice in before)
    assert last["finish_reason"] == "stop"
    assert last["early_exit"] == {"certified": True, "tokens": 4, "mean_exit_layer": 3.5, "layers_skipped": 0.5625}


def test_every_step_is_a_chunk() -> None:
    """So that a client measures the time between tokens, even where a token brings no text."""
    assert [part["choices"][0]["text"] for part in chunks(prompt="hello")] == ["<he", "llo", ">", "", ""]


PIECES = {
    "lone blanks": ["", "?", " ", "?"],
    "single letters": ["the", " ", "q", "u", "i", "c", "k", " fox"],
    "nothing at all": [],
    "line breaks": ["a\n", "\r\n\n", "data: b\n\n", "\u2028\u2029\x85"],
    "many bytes": ["é", "🙂", "日本"],
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("reason", [Reason.eos, Reason.length])
def test_joined_chunks_are_the_whole_answers_text(name: str, reason: Reason) -> None:
    """Case 08, also where max_tokens cuts inside a word."""
    pieces = tuple((text, (5,), (2,)) for text in PIECES[name])

    def script(source: Source, options: RequestOptions) -> Script:
        return Script(pieces, rest="x", reason=reason)

    whole = complete(app_of(FakeEngine(script))).json()["choices"][0]["text"]
    assert whole == "".join(PIECES[name]) + "x"
    assert texts(chunks(FakeEngine(script))) == {0: whole}


def test_streamed_choices_carry_their_index_and_each_ends_once() -> None:
    """Case 09, streamed: chunks interleave."""
    fields: dict[str, Any] = {"prompt": ["A long prompt", "B", "A long prompt"], "n": 2}
    parts = chunks(**fields)
    whole = {choice["index"]: choice["text"] for choice in complete(app_of(), **fields).json()["choices"]}
    assert texts(parts) == whole
    assert set(whole) == set(range(6)) and whole[0] == whole[5] == said_of("A long prompt")
    order = [choice["index"] for part in parts for choice in part["choices"]]
    assert order != sorted(order)


def test_the_usage_comes_last_and_only_where_it_is_asked_for() -> None:
    fields: dict[str, Any] = {"prompt": ["A", "B"], "n": 2, "temperature": 1, "seed": 3}
    *before, last = chunks(**fields, stream_options={"include_usage": True})
    assert all(part["usage"] is None and part["choices"] for part in before)
    assert last["choices"] == [] and last["usage"] == complete(app_of(), **fields).json()["usage"]
    for off in ({"include_usage": False}, {}, None):
        assert all("usage" not in part for part in chunks(**fields, stream_options=off))


def test_layers_come_with_their_tokens_and_join_to_all_of_them() -> None:
    asked = {"policy": "full", "layers": True}
    parts = chunks(prompt=["hello world", "b"], early_exit=asked)
    joined: dict[int, list[int]] = {0: [], 1: []}
    for part in parts:
        for choice in part["choices"]:
            joined[choice["index"]] += choice["early_exit"]["exit_layers"]
    whole = complete(app_of(), prompt=["hello world", "b"], early_exit=asked).json()["choices"]
    assert joined == {choice["index"]: choice["early_exit"]["exit_layers"] for choice in whole}
    assert joined[0] == [1, 2, 3, 4, 5, 8]


def test_tokens_that_only_the_end_tells_have_their_layers_there() -> None:
    """The engine may tell the last tokens with the end, without a step of their own."""
    from serve.http.answers import Told
    from serve.http.plan import Job

    told = Told({}, 8, True)
    job = Job("a", RequestOptions(), "prompt", 0, (0,))
    engine = FakeEngine()

    async def ended() -> Any:
        stream = engine.submit("a", RequestOptions(), deadline=float("inf"), id="x")
        spoken = [spoke async for spoke in stream]
        return spoken[0], stream.ended

    first, end = asyncio.run(ended())
    assert told.hear(job, first)[0]["early_exit"] == {"exit_layers": [1]}
    assert told.hear(job, end)[0]["early_exit"]["exit_layers"] == [8]


@pytest.mark.parametrize(
    ("error", "status"), [(DataError("it has 99 tokens"), 400), (RuntimeError("boom"), 500)], ids=["400", "500"]
)
def test_what_is_refused_before_a_token_has_its_own_status(error: Exception, status: int) -> None:
    def script(source: Source, options: RequestOptions) -> Script:
        return Script(refused=error) if source == "bad" else Script((("x", (5,), (2,)),))

    for prompt in ("bad", ["good", "bad"], ["bad", "good"]):
        response = complete(app_of(FakeEngine(script)), prompt=prompt, stream=True)
        assert response.status_code == status
        error_of(response)


def test_a_failure_in_the_middle_is_an_error_event_that_ends_the_stream() -> None:
    def script(source: Source, options: RequestOptions) -> Script:
        return Script((("x", (5,), (2,)),) * 3, failed="secret reason" if source == "bad" else "")

    engine = FakeEngine(script)
    response = complete(app_of(engine), prompt=["bad", "good"], stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert [name for name, _ in events].count("error") == 1
    name, content = events[-1]
    assert name == "error" and content["error"]["code"] == "engine_failed"
    assert content["error"]["param"] == "prompt[0]"
    assert "secret" not in response.text and "[DONE]" not in response.text


def test_an_engine_that_dies_in_the_middle_is_an_error_event() -> None:
    """Fault 35: pending requests are told."""
    engine = FakeEngine()
    engine.hold_at = 2

    async def ask_and_die() -> Any:
        import httpx

        transport = httpx.ASGITransport(app=app_of(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": NAME, "prompt": "a long prompt", "stream": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.steps == 2:
                await asyncio.sleep(0.001)
            engine.die()
            return await asking

    response = asyncio.run(ask_and_die())
    assert response.status_code == 200
    name, content = events_of(response.text)[-1]
    assert (name, content["error"]["code"], content["error"]["type"]) == ("error", "engine_gone", "unavailable_error")


@pytest.mark.parametrize("ignores", [False, True])
def test_a_stream_that_takes_too_long_ends_with_an_error_event(ignores: bool) -> None:
    engine = FakeEngine(ignores_deadlines=ignores)
    engine.hold_at = 2
    response = complete(app_of(engine, request_timeout_s=1.0), prompt="a long prompt", stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert [content["choices"][0]["text"] for _, content in events[:-1]] == ["<a ", "lon"]
    assert events[-1][0] == "error" and events[-1][1]["error"]["code"] == "request_timeout"


def test_a_stream_that_never_begins_is_a_504() -> None:
    engine = FakeEngine()
    engine.held = True
    response = complete(app_of(engine, request_timeout_s=0.05), stream=True)
    assert response.status_code == 504 and error_of(response)["code"] == "request_timeout"


def test_text_outside_of_ascii_is_sent_as_it_is() -> None:
    response = complete(app_of(), prompt="é🙂", stream=True)
    assert "é🙂".encode() in response.content
    assert json.loads(complete(app_of(), prompt="é🙂").content)["choices"][0]["text"] == "<é🙂>"
