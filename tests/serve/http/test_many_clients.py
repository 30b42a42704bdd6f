"""Many clients at once: everybody gets a whole answer, and their own."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx

from calm.serve_config import ServeLimits

from .fakes import NAME, FakeEngine, said_of
from .running import Running, events_of, running

CLIENTS = 200


async def one(client: httpx.AsyncClient, number: int) -> tuple[int, bool]:
    """A request with a tag of its own; the status, and whether all of the answer was for this tag."""
    tags = [f"tag {number} {letter}" for letter in "ab"[: 1 + number % 2]]
    stream = number % 3 == 0
    body: dict[str, Any] = {"model": NAME, "prompt": tags, "n": 1 + number % 2, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return response.status_code, int(response.headers["retry-after"]) > 0
    wanted = [said_of(tag) for tag in tags for _ in range(1 + number % 2)]
    if not stream:
        return 200, [choice["text"] for choice in response.json()["choices"]] == wanted
    texts = [""] * len(wanted)
    events = events_of(response.text)
    for _, part in events[:-1]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    return 200, texts == wanted and events[-1][1] == "[DONE]"


def all_at_once(server: Running, count: int) -> Counter[tuple[int, bool]]:
    async def run() -> list[tuple[int, bool]]:
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(count)))

    return Counter(asyncio.run(run()))


def test_two_hundred_at_once_get_their_own_answers() -> None:
    """Fault 32, the server's part: none lost, none mixed."""
    with running(FakeEngine(slots=16)) as server:
        assert all_at_once(server, CLIENTS) == {(200, True): CLIENTS}
        assert not server.engine.open


def test_what_is_too_much_is_429_or_503_with_retry_after_and_the_rest_is_answered() -> None:
    """Fault 32: every request ends in 200, 429 or 503, and nothing is left behind."""
    engine = FakeEngine(slots=2, max_waiting=10)
    with running(engine, limits=ServeLimits(connections=100)) as server:
        found = all_at_once(server, 150)
        assert set(found) <= {(200, True), (429, True), (503, True)} and sum(found.values()) == 150
        assert found[200, True] > 0 and found[429, True] > 0
        assert not engine.open
        assert all_at_once(server, 4) == {(200, True): 4}


def test_a_response_is_what_was_asked_for_even_on_connections_that_are_shared() -> None:
    """Ten clients, five requests each, one after another on the same connections."""

    async def run(url: str) -> set[bool]:
        found = set()

        async def chat(client: httpx.AsyncClient, name: int) -> None:
            for turn in range(5):
                body = {"model": NAME, "prompt": f"{name} {turn}"}
                response = await client.post("/v1/completions", content=json.dumps(body), headers=JSON)
                found.add(response.json()["choices"][0]["text"] == said_of(f"{name} {turn}"))

        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=5), timeout=120) as client:
            await asyncio.gather(*(chat(client, name) for name in range(10)))
        return found

    with running() as server:
        assert asyncio.run(run(server.url)) == {True}


JSON = {"content-type": "application/json"}
