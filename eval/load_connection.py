"""Connections of the load client: HTTP/1.1 (h11) straight on asyncio's transports, kept alive and used again.

A chunk's time is taken when its bytes are read from the socket, before anything is parsed. Knows no completions: what
comes goes to a ``Reply``. There is no limit of its own on connections: a request never waits for another's.

A server may close an idle connection just when the next request is sent on it. That request, to which not a byte was
answered, is sent once more on a new connection, and counted; a request whose connection was new is not.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

import h11

from calm.load_config import Endpoint

from .load_stream import Malformed, Reply, short

MAX_HEAD_BYTES = 1 << 16


class Disconnected(Exception):
    """A connection ended before its answer did; one line.

    Attributes:
        silent: not a byte of the answer had come.
    """

    def __init__(self, detail: str, silent: bool) -> None:
        super().__init__(detail)
        self.silent = silent


class Unreachable(Disconnected):
    """No connection could be made."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, True)


class Connection(asyncio.Protocol):
    """One connection, and at most one request on it."""

    def __init__(self, now: Callable[[], float], gone: "Callable[[Connection], None]") -> None:
        self._now, self._gone = now, gone
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._over: asyncio.Future[None] | None = None
        self._silent = True

    async def exchange(self, request: h11.Request, body: bytes, reply: Reply) -> None:
        """Send a request and wait for its answer's end.

        Raises:
            Disconnected: the connection ended before.
            Malformed: what came is no HTTP, or not what the reply takes. The connection is closed.
        """
        assert self._over is None
        if self._transport is None:
            raise Disconnected("closed by the server", True)
        self._reply, self._silent = reply, True
        self._over = asyncio.get_running_loop().create_future()
        events = [request, h11.Data(body), h11.EndOfMessage()] if body else [request, h11.EndOfMessage()]
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        try:
            await self._over
        except BaseException:
            self.close()
            raise
        finally:
            self._reply = self._over = None

    def ready(self) -> bool:
        """Whether another request can be sent on it."""
        if self._transport is None or self._transport.is_closing() or self._http.trailing_data[0]:
            return False
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return self._http.our_state is h11.IDLE

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        at = self._now()
        if self._over is None or self._over.done():  # nobody asked: a farewell such as 408
            self.close()
            return
        self._silent = False
        self._feed(at, data)

    def eof_received(self) -> None:
        self._feed(self._now(), b"")

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            said = "closed by the server" if error is None else short(f"{type(error).__name__}: {error}")
            self._over.set_exception(Disconnected(said, self._silent))
        self._transport = None
        self._gone(self)

    def _feed(self, at: float, data: bytes) -> None:
        """Take bytes, or (none) the end, through HTTP to the reply."""
        if self._over is None or self._over.done() or self._reply is None:
            return
        try:
            self._http.receive_data(data)
            self._read(at, self._reply)
        except h11.RemoteProtocolError as error:
            if not data:
                self._over.set_exception(Disconnected("closed by the server before the answer's end", self._silent))
            else:
                self._over.set_exception(Malformed(short(f"no HTTP: {error}")))
        except Malformed as error:
            self._over.set_exception(error)

    def _read(self, at: float, reply: Reply) -> None:
        assert self._over is not None
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                reply.head(event.status_code, dict(event.headers))
            elif isinstance(event, h11.Data):
                reply.data(at, bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._over.set_result(None)
                return
            elif not isinstance(event, h11.InformationalResponse):  # nothing whole is left
                return


class Pool:
    """All connections to one server.

    Attributes:
        opened: connections made so far.
    """

    def __init__(self, server: Endpoint, now: Callable[[], float] = time.perf_counter) -> None:
        self.server, self.opened = server, 0
        self._now = now
        self._idle: dict[Connection, None] = {}  # in the order of their last use
        self._all: set[Connection] = set()
        self._address: str | None = None
        self._tls = ssl.create_default_context() if server.secure else None

    async def exchange(self, request: h11.Request, body: bytes, reply: Callable[[], Reply]) -> None:
        """Send a request and wait for its answer's end.

        Args:
            reply: makes one for every sending: one, or two where an idle connection had just been closed.

        Raises:
            Disconnected, Unreachable, Malformed: as ``Connection.exchange``, or no connection could be made.
        """
        connection = self._take()
        if connection is not None:
            try:
                await self._use(connection, request, body, reply())
                return
            except Disconnected as error:
                if not error.silent:
                    raise
        await self._use(await self._open(), request, body, reply())

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._all):
            connection.close()

    async def _use(self, connection: Connection, request: h11.Request, body: bytes, reply: Reply) -> None:
        await connection.exchange(request, body, reply)
        if connection.ready():
            self._idle[connection] = None
        else:
            connection.close()

    def _take(self) -> Connection | None:
        """The one used last: the server will not have given it up yet."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.ready():
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            if self._address is None:  # looked up once, not for every connection
                found = await loop.getaddrinfo(self.server.host, self.server.port, type=socket.SOCK_STREAM)
                addresses = [str(each[4][0]) for each in found]
            else:
                addresses = [self._address]
            for number, address in enumerate(addresses, 1):
                try:
                    connection = await self._connect(address)
                    break
                except OSError:
                    if number == len(addresses):
                        raise
        except OSError as error:
            raise Unreachable(short(f"cannot connect: {error.strerror or error}")) from None
        self._address = address
        self._all.add(connection)
        self.opened += 1
        return connection

    async def _connect(self, address: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._now, self._forget),
            address,
            self.server.port,
            ssl=self._tls,
            server_hostname=self.server.host if self._tls is not None else None,
        )
        return connection

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)
