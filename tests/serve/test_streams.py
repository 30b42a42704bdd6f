"""One request's stream: what waits is one piece, the end comes once, and who stops reading cancels."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from calm.errors import CalibrationError, CalmError, ConfigError, DataError
from serve.errors import EngineGone, QueueFull
from serve.messages import Ended, Refused, Spoke
from serve.requests import Reason, Status, Timing
from serve.streams import Stream


def said(text: str, *tokens: int) -> Spoke:
    return Spoke("a", text, tokens, tuple(token + 1 for token in tokens))


def ended(text: str = "", **changes: Any) -> Ended:
    values: dict[str, Any] = dict(
        id="a", status=Status.finished, reason=Reason.eos, text=text, prompt_tokens=3, tokens=3, certified=True,
        emission_layers=(1, 2, 3), executed_layers=(1, 2, 3), involuntary=0, timing=Timing(1.0, 2.0, 3.0, 4.0),
    )  # fmt: skip
    return Ended(**{**values, **changes})


def in_loop(check: Callable[[Stream, list[str]], Any]) -> None:
    async def main() -> None:
        aborts: list[str] = []
        await check(Stream("a", lambda: aborts.append("a")), aborts)

    asyncio.run(main())


def test_pieces_come_as_they_are_told_and_then_the_end() -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        found: list[Spoke] = []

        async def read() -> None:
            async for spoke in stream:
                found.append(spoke)

        reader = asyncio.create_task(read())
        for event in (said("x ", 5), said("", 6), said("y", 7)):
            stream.take(event)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert found[-1] == event
        assert stream.ended is None and not stream.over
        stream.take(ended(" z"))
        await reader
        assert stream.ended == ended(" z") and stream.over
        assert [item async for item in stream] == []
        stream.cancel()
        assert aborts == []

    in_loop(check)


def test_what_a_slow_reader_missed_is_one_piece() -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        for token in range(1000):
            stream.take(said(f"{token} ", token))
        assert await anext(stream) == said("".join(f"{token} " for token in range(1000)), *range(1000))
        stream.take(said("b", 1))
        stream.take(said("c", 2))
        stream.take(ended())
        assert [item async for item in stream] == [said("bc", 1, 2)]  # before the end, though it is there already

    in_loop(check)


def test_the_result_has_all_that_was_not_fetched() -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        waiting = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        for event in (said("x ", 5), said("y", 6), ended(" z")):
            stream.take(event)
        assert await waiting == ended("x y z")
        assert await stream.result() == ended(" z")  # nothing is told twice

    in_loop(check)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("QueueFull", QueueFull),
        ("ConfigError", ConfigError),
        ("DataError", DataError),
        ("CalibrationError", CalibrationError),
        ("CalmError", CalmError),
        ("ZeroDivisionError", CalmError),
    ],
)
def test_a_refusal_is_the_error_that_it_was(kind: str, error: type[CalmError]) -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        stream.take(Refused("a", kind, "no, because"))
        for attempt in (stream.__anext__, stream.result):
            with pytest.raises(error, match="^no, because$") as caught:
                await attempt()
            assert type(caught.value) is error
        assert stream.over and stream.ended is None

    in_loop(check)


def test_a_lost_engine_raises_after_what_had_come() -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        stream.take(said("x", 1))
        stream.lose(EngineGone("gone"))
        assert (await anext(stream)).text == "x"
        with pytest.raises(EngineGone, match="gone"):
            await anext(stream)
        stream.cancel()
        assert aborts == []

    in_loop(check)


@pytest.mark.parametrize("how", ["cancel", "aclose", "reader", "result"])
def test_who_stops_reading_cancels_once(how: str) -> None:
    async def check(stream: Stream, aborts: list[str]) -> None:
        if how in ("reader", "result"):
            reader = asyncio.create_task(stream.result() if how == "result" else anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        elif how == "aclose":
            await stream.aclose()
        else:
            stream.cancel()
        assert aborts == ["a"]
        stream.cancel()
        await stream.aclose()
        assert aborts == ["a"]
        stream.take(ended(status=Status.cancelled, reason=Reason.cancelled))
        assert (await stream.result()).status is Status.cancelled

    in_loop(check)
