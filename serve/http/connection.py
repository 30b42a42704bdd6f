"""One client's connection: what uvicorn leaves open for ever gets a deadline, and every refusal has the same form.

- A request's head has ``head_s`` to arrive, however slowly its bytes come; so has a connection's first byte.
- A client that takes nothing of what is written for ``write_s`` is dropped.
- A body that nobody reads any more has ``linger_s`` to end: closing at once would reset the answer away.
- Above ``most`` connections requests are answered 503; above twice as many, connections are closed unanswered.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .disconnects import DROP
from .errors import ApiError, bad_request, send_error


@dataclass(frozen=True)
class ConnectionLimits:
    """Times are seconds."""

    most: int = 512
    head_s: float = 10.0
    write_s: float = 60.0
    linger_s: float = 5.0


class Lingering:
    """A transport that does not close on a client which still sends, as that would reset the answer away.

    Args:
        unread: whether the client still sends.
        linger: what to do then instead.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool], linger: Callable[[], None]) -> None:
        self._transport, self._unread, self._linger = transport, unread, linger

    def close(self) -> None:
        self._linger() if self._unread() else self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's, with deadlines. ``limits`` are those of the server: see ``connection_class``."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None
    _extra = False  # there were more than ``most`` when it came
    _over = False  # it has had its last answer; what still comes is read away

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = Lingering(transport, self._still_sends, self._read_away)  # type: ignore[assignment]
        if len(self.connections) > 2 * self.limits.most:
            return transport.abort()
        self._extra = len(self.connections) > self.limits.most
        self._served, self.app = self.app, self._admitted
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._write, self._linger):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self.conn.their_state is h11.IDLE and self._head is None:
            self._await_head()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self._head is not None:
            self._head.cancel()
            self._head = None
        elif self.conn.their_state is h11.IDLE and self._head is None and self.timeout_keep_alive_task is None:
            # the end of a body that nobody had waited for
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self._over and not self.transport.is_closing():
            self._linger = self.loop.call_later(self.limits.linger_s, self._end_lingering)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write is not None:
            self._write.cancel()
            self._write = None

    def timeout_keep_alive_handler(self) -> None:
        """By now the client has read its answer or will not: nothing is waited for."""
        super().timeout_keep_alive_handler()
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP. The rest of it is read away for a while, so that the client gets to see the answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.transport.close()
        content = bad_request("this is no HTTP request that can be read").content
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for each in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(each) or b"")
        self._read_away()

    def _still_sends(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and not self._over

    def _read_away(self) -> None:
        """Say no more, and close when the client has, or after a while."""
        self._over = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._linger = self.loop.call_later(self.limits.linger_s, self.transport.abort)

    def _await_head(self) -> None:
        self._head = self.loop.call_later(self.limits.head_s, self.transport.abort)

    def _end_lingering(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self.transport.abort()

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, told how to drop this connection; or a refusal while there are too many."""
        scope[DROP] = self.transport.abort
        self._extra = self._extra and len(self.connections) > self.limits.most
        if self._extra:
            error = ApiError(503, "too many connections; try again later", code="too_many_connections")
            return await send_error(error, scope, send)
        await self._served(scope, receive, send)


def connection_class(limits: ConnectionLimits) -> type[Connection]:
    """A class for uvicorn, which makes one of it for every connection."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
