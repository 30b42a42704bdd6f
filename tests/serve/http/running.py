"""Ways to reach the server in a test: the application by itself, or all of it at a port of its own."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import SIGTERM
from typing import Any

import httpx
from starlette.types import ASGIApp

from serve.http.app import create_app
from serve.http.backend import ServedEngine
from serve.http.server import Service, listen

from .fakes import NAME, FakeEngine, config_of

PATIENCE_S = 60.0  # of a test for what must happen; the machine may be busy


def app_of(engine: FakeEngine | None = None, key: str | None = None, **settings: Any) -> ASGIApp:
    return create_app(engine or FakeEngine(), config_of(**settings), NAME, key)


def ask(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, without sockets."""

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(one())


def complete(app: ASGIApp, **fields: Any) -> httpx.Response:
    """POST /v1/completions with these fields, model and prompt given unless they are."""
    body = {"model": NAME, "prompt": "a", **fields}
    return ask(app, "POST", "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error that a response is; it has to have the form of one."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"] and "\n" not in error["message"]
    return error


def events_of(text: str) -> list[tuple[str | None, Any]]:
    """Name and content of each server-sent event; the framing has to be exact."""
    assert text.endswith("\n\n")
    found: list[tuple[str | None, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        assert len(lines) == 1 and lines[0].startswith("data: "), block
        data = lines[0].removeprefix("data: ")
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


def eventually(what: Callable[[], object]) -> None:
    """Wait until it holds, which another thread brings about."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.002)


@dataclass
class Running:
    """A server in a thread; ``engine`` is what ``running`` was given."""

    engine: Any
    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    status: list[int] = field(default_factory=list)
    error: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return connection

    def signal(self, number: int = SIGTERM) -> None:
        self.loop.call_soon_threadsafe(self.service.signals.came, number)

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextmanager
def running(
    engine: ServedEngine | None = None, key: str | None = None, *, wait: bool = True, **settings: Any
) -> Iterator[Running]:
    """All of the server, at a free port; drained and gone afterwards. ``wait``: until it is ready."""
    engine = engine or FakeEngine()
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    made: list[Running] = []
    there = threading.Event()

    async def life() -> int:
        service = Service(engine, config_of(**settings), NAME, key, listener)
        made.append(Running(engine, port, service, asyncio.get_running_loop(), threading.current_thread()))
        there.set()
        return await service.run()

    def work() -> None:
        try:
            made_status = asyncio.run(life())
            made[0].status.append(made_status)
        except BaseException as error:
            if made:
                made[0].error.append(error)
            there.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert there.wait(PATIENCE_S) and made
    server = made[0]
    try:
        if wait:
            eventually(lambda: engine.state == "ready" or server.error)
        yield server
    finally:
        if isinstance(engine, FakeEngine):
            engine.held, engine.hold_at = False, None
        if thread.is_alive():
            server.signal()
        server.join()


def request_bytes(body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    """A POST as it goes over the wire."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return ("\r\n".join([*head, f"content-length: {len(content)}"]) + "\r\n\r\n").encode() + content


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes, however it does."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response with a declared length: status, headers, body."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = connection.recv(65536)
        assert piece, f"closed after {found!r}"
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(first.split()[1]), headers, body
