"""Before a load: whether a server is there and takes what will be sent; each way to be wrong is one line."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from calm.errors import ConfigError
from calm.load_config import Endpoint, LoadConfig, early_exit, endpoint
from eval.load_client import Client, body_of
from eval.load_ready import NotReady, find_model, probe

from .load_server import Call, Script, Server, served, words


def with_client(script: Script, work: Callable[[Client, Server], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with served(script, **options) as server:
            client = Client(server.url)
            try:
                return await work(client, server)
            finally:
                client.close()

    return asyncio.run(main())


def model(served_model: str | None = None, path: str = "", **options: Any) -> str:
    async def work(client: Client, server: Server) -> str:
        client.server = endpoint(server.url + path)
        return await find_model(client, server.url, served_model, 60.0)

    found: str = with_client(words, work, **options)
    return found


def test_the_model_is_the_one_asked_for_or_the_first() -> None:
    assert model(models=("a", "b")) == "a" and model("b", models=("a", "b")) == "b"
    assert model(path="/v1/") == "m"
    with pytest.raises(NotReady, match="served_model=c is not at .*; it has a, b$"):
        model("c", models=("a", "b"))
    with pytest.raises(NotReady, match="it has 0, 1, 2, 3, 4 and 2 more$"):
        model("c", models=tuple("0123456"))
    with pytest.raises(NotReady, match="lists no model"):
        model(models=())


class Answers(Server):
    """Answers every look at the models as told."""

    def __init__(self, status: int, value: Any) -> None:
        super().__init__(words)
        self.status, self.value = status, value

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = await self._read(reader, writer, 1, 0)
        assert call is not None
        if isinstance(self.value, bytes):
            call.send(self.value)
        else:
            call.plain(self.status, self.value)
        writer.close()


def line_for(status: int, value: Any, served_model: str | None = None) -> str:
    async def main() -> str:
        server = Answers(status, value)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        client = Client(server.url)
        try:
            return await find_model(client, server.url, served_model, 60.0)
        finally:
            client.close()
            listening.close()

    with pytest.raises(NotReady) as caught:
        asyncio.run(main())
    line = str(caught.value)
    assert "\n" not in line and "url=http://127.0.0.1:" in line
    return line


def test_what_is_no_completions_server_is_told_at_once() -> None:
    assert "answers 404 to /v1/models; give the address before /v1" in line_for(404, {"detail": "Not Found"})
    assert "with no list of models" in line_for(200, {"hello": "world"})
    assert "with no list of models" in line_for(200, [1])
    assert "no HTTP" in line_for(200, b"220 mail.example ESMTP\r\n\r\n")


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_key_is_told_with_where_it_belongs(status: int) -> None:
    assert f"answers {status}: it wants an API key, or another one; set CALM_API_KEY" in line_for(status, {})


def test_a_server_that_lists_nothing_is_believed_where_a_model_is_named() -> None:
    async def main() -> str:
        server = Answers(404, {})
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        client = Client(server.url)
        found = await find_model(client, server.url, "mine", 60.0)
        client.close()
        listening.close()
        return found

    assert asyncio.run(main()) == "mine"


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_a_server_that_starts_late_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    async def work(client: Client, server: Server) -> str:
        port, server.port = server.port, 0

        async def sleep(seconds: float) -> None:
            clock.time += seconds
            if clock.time >= 2.0:
                object.__setattr__(client.pool, "server", endpoint(f"http://127.0.0.1:{port}"))

        client.pool.server = Endpoint(False, "127.0.0.1", 1, "")  # nobody listens there
        return await find_model(client, "URL", None, 10.0, now=clock.now, sleep=sleep)

    assert with_client(words, work) == "m" and clock.time == 2.0
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "waiting up to 10 s for url=URL: cannot connect" in said


def test_a_server_that_never_comes_is_given_up_with_the_reason() -> None:
    async def gone(url: str, clock: Clock) -> None:
        client = Client(url)
        await find_model(client, url, None, 3.0, now=clock.now, sleep=clock.sleep)

    clock = Clock()
    with pytest.raises(NotReady, match=r"no server is ready at url=http://127.0.0.1:1 within 3 s \(cannot connect"):
        asyncio.run(gone("http://127.0.0.1:1", clock))
    assert clock.time == 3.0


def test_a_server_that_is_loading_is_given_its_time() -> None:
    clock = Clock()

    async def main() -> str:
        server = Answers(503, {"error": {"message": "loading"}})
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        client = Client(server.url)

        async def sleep(seconds: float) -> None:
            clock.time += seconds
            if clock.time >= 1.5 and turns:
                server.status, server.value = 200, {"data": [{"id": "m"}]}

        try:
            return await find_model(client, server.url, None, 4.0, now=clock.now, sleep=sleep)
        finally:
            client.close()
            listening.close()

    turns = True
    assert asyncio.run(main()) == "m"
    turns = False
    with pytest.raises(NotReady, match=r"within 4 s \(it says 503: loading\)"):
        asyncio.run(main())


def first_request(script: Script, way: str = "full") -> float:
    """Seconds that were waited."""
    clock = Clock()

    async def main() -> None:
        async with served(script) as server:
            client = Client(server.url)
            try:
                body = body_of("m", "x", early_exit=early_exit(way))
                await probe(client, server.url, way, body, 3.0, now=clock.now, sleep=clock.sleep)
            finally:
                client.close()

    asyncio.run(main())
    return clock.time


def refuses(status: int, message: str) -> Script:
    async def script(call: Call) -> None:
        call.refuse(status, message)

    return script


def test_the_first_request_of_every_way_must_be_answered() -> None:
    first_request(words)
    with pytest.raises(
        NotReady, match="way full: the first request to url=.* failed: status 404: no such model; check"
    ):
        first_request(refuses(404, "no such model"))
    with pytest.raises(NotReady, match="CALM_API_KEY"):
        first_request(refuses(401, "who are you"))
    with pytest.raises(NotReady, match=r"status 400: unknown field.*takes only ways=\[plain\]"):
        first_request(refuses(400, "unknown field"))
    with pytest.raises(NotReady, match="status 400: too long$"):
        first_request(refuses(400, "too long"), way="plain")
    with pytest.raises(NotReady, match="refused 429: full$"):
        first_request(refuses(429, "full"))
    with pytest.raises(NotReady, match="refused 503: loading$"):
        first_request(refuses(503, "loading"))


def test_a_server_that_lists_its_model_while_it_loads_is_waited_for() -> None:
    asked: list[Call] = []

    async def script(call: Call) -> None:
        asked.append(call)
        if len(asked) < 4:
            call.refuse(503, "loading")
        else:
            call.words(1)

    assert first_request(script) == 3 * 0.5 and len(asked) == 4


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", Endpoint(False, "127.0.0.1", 8000, "")),
        ("http://localhost/", Endpoint(False, "localhost", 80, "")),
        ("https://x.example/api/v1", Endpoint(True, "x.example", 443, "/api")),
        ("http://x:1/v1/completions", Endpoint(False, "x", 1, "")),
        ("http://[::1]:9", Endpoint(False, "::1", 9, "")),
    ],
)
def test_a_url_may_be_given_with_or_without_its_path(url: str, found: Endpoint) -> None:
    assert endpoint(url) == found


def test_hosts_are_named_as_http_wants_it() -> None:
    assert endpoint("http://[::1]:9").authority == "[::1]:9" and endpoint("https://x").authority == "x"
    assert endpoint("http://x:443").authority == "x:443"


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x?y", "http://ü.example", "http://x/a b", ""],
)
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="write it like http://127.0.0.1:8000"):
        LoadConfig(url=url)
    with pytest.raises(ConfigError, match="CALM_API_KEY") as caught:
        LoadConfig(url="http://me:secret@x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("way", "field"),
    [
        ("plain", None),
        ("full", {"policy": "full"}),
        ("static=4", {"policy": "static", "layer": 4}),
        ("tolerance=0.05", {"tolerance": 0.05}),
        ("threshold=0.8", {"threshold": 0.8}),
    ],
)
def test_ways_become_the_servers_field(way: str, field: Any) -> None:
    assert early_exit(way) == field


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ways": ["fast"]}, "'fast' is none; choose from plain, full, static=LAYER"),
        ({"ways": ["full=1"]}, "'full=1' is none"),
        ({"ways": ["static"]}, "'static' is none"),
        ({"ways": ["static=x"]}, "'static=x' needs a number"),
        ({"ways": ["static=0"]}, r"ways: static=0 must lie in \[1"),
        ({"ways": ["threshold=2"]}, r"ways: threshold=2 must lie in \[0, 1\]"),
        ({"ways": ["tolerance=nan"]}, "tolerance=nan must lie"),
        ({"ways": []}, "ways needs at least one"),
        ({"rates": [1.0, 1.0]}, "rates needs at least one entry, and none twice"),
        ({"rates": [0.0]}, "rates must lie in"),
        ({"rates": [float("nan")]}, "rates must lie in"),
        ({"n": 0}, "n must lie"),
        ({"goodput": {"itl": 3.0}}, "goodput.itl: no such limit; choose from ttft, tpot, e2el"),
        ({"goodput": {"ttft": -1.0}}, "goodput.ttft must lie"),
        ({"prompts": "x", "random_tokens": 3}, "prompts= and random_tokens= exclude each other"),
        ({"ignore_eos": True}, "ignore_eos=true needs max_tokens="),
        ({"extra_body": {"stream": False}}, "extra_body.stream: this field has a setting of its own"),
        ({"percentiles": [101.0]}, "percentiles must lie"),
        ({"timeout": float("inf")}, "timeout must lie"),
        ({"burstiness": 0.0}, "burstiness must lie"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoadConfig(**changes)
