"""A small HTTP server that answers completions as a script says: well, late, cut off, or not at all."""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Call"], Awaitable[None]]
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def word(text: str = "word ") -> bytes:
    """A chunk with choices."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


def usage(tokens: int, prompt: int = 3) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}})


@dataclass
class Call:
    """One request, and the ways to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    on_connection: int  # how many came before on the same connection
    writer: asyncio.StreamWriter
    over: bool = False  # the connection shall end

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def head(self, status: int = 200, kind: str = "text/event-stream", more: str = "") -> None:
        """Of a chunked body."""
        self.send(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{more}\r\n".encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.send(b"0\r\n\r\n")

    def plain(self, status: int, value: Any, more: str = "") -> None:
        """A whole answer in JSON."""
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        self.send(head.encode() + body)

    def refuse(self, status: int, message: str) -> None:
        self.plain(status, {"error": {"message": message, "type": "x", "code": "x", "param": None}})

    def drop(self) -> None:
        """End the connection."""
        self.over = True

    def words(self, count: int, tokens: int | None = None) -> None:
        """A whole stream at once."""
        self.head()
        for _ in range(count):
            self.chunk(word())
        self.chunk(usage(count if tokens is None else tokens))
        self.chunk(DONE)
        self.end()


@dataclass
class Server:
    """What was seen; ``script`` answers completions and may be changed at any time."""

    script: Script
    models: tuple[str, ...] = ("m",)
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Call]:
        return [call for call in self.calls if call.path.endswith("/completions")]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection until it ends."""
        self.connections += 1
        connection, before = self.connections, 0
        try:
            while (call := await self._read(reader, writer, connection, before)) is not None:
                before += 1
                self.calls.append(call)
                if call.path.endswith("/models"):
                    call.plain(200, {"data": [{"id": name} for name in self.models]})
                else:
                    await self.script(call)
                await writer.drain()
                if call.over:
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int, before: int
    ) -> Call | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError:
            return None
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Call(method, path, headers, body, connection, before, writer)


@asynccontextmanager
async def served(script: Script, tls: ssl.SSLContext | None = None, **options: Any) -> AsyncIterator[Server]:
    """A server in the running loop."""
    server = Server(script, **options)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=2048, limit=1 << 20, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


@contextmanager
def served_aside(script: Script, **options: Any) -> Iterator[Server]:
    """A server in a thread of its own, for programs that have a loop themselves."""
    started, found = threading.Event(), list[Server]()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with served(script, **options) as server:
            found.append(server)
            started.set()
            await stop.wait()
        mine = asyncio.current_task()
        for task in asyncio.all_tasks() - {mine}:
            task.cancel()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(60)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


async def words(call: Call) -> None:
    """The script of a good server: three words."""
    call.words(3)
