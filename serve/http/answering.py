"""The response to a call: whole, or told while it is made; given up when its client leaves or its time is over."""

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Told
from .call import Call, timed_out
from .disconnects import drop, until_gone
from .errors import ApiError, send_error
from .events import DONE, HEADERS, event

LAST_WORD_S = 1.0  # for the error event of a client that may have stopped reading


class Answering(Response):
    """Runs a call and sends what it says.

    Args:
        call: not entered yet.
        told: what it will have said.
        stream, show_usage: as events; with a last one for the usage.
        timeout_s: until everything is sent.
        facts: gets what is known of the request in the end, for the log.
    """

    def __init__(
        self, call: Call, told: Told, stream: bool, show_usage: bool, timeout_s: float, facts: dict[str, Any]
    ) -> None:
        super().__init__()
        self._call, self._told = call, told
        self._stream, self._show_usage, self._timeout_s, self._facts = stream, show_usage, timeout_s, facts
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, send))
        if await until_gone(receive, work):
            self._facts["gone"] = True

    async def _work(self, scope: Scope, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._call:
                if self._stream:
                    return await self._tell(send)
                await self._listen()
            await self._say(send)
        except TimeoutError:
            await self._fail(timed_out(self._timeout_s), scope, send)
        except ApiError as error:
            await self._fail(error, scope, send)
        finally:
            self._facts.update(self._told.summary())

    async def _listen(self) -> None:
        async for job, said in self._call.events():
            self._told.hear(job, said)

    async def _say(self, send: Send) -> None:
        content = json.dumps(self._told.whole(), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _tell(self, send: Send) -> None:
        """Nothing is sent before the engine took the call, so that a refusal still has its own status."""
        async for job, said in self._call.events():
            if not self._started:
                if self._call.failure is not None:
                    raise self._call.failure
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            choices = self._told.hear(job, said)
            chunks = [self._told.chunk([choice], show_usage=self._show_usage) for choice in choices]
            await self._send(b"".join(event(chunk) for chunk in chunks), send)
        last = self._told.chunk([], self._told.usage(), show_usage=True)
        await self._send((event(last) if self._show_usage else b"") + DONE, send, more=False)

    async def _fail(self, error: ApiError, scope: Scope, send: Send) -> None:
        if not self._started:
            return await send_error(error, scope, send)
        self._facts["error"] = error.code
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._send(event(error.body, "error"), send, more=False)
        except TimeoutError:
            drop(scope)

    @staticmethod
    async def _send(content: bytes, send: Send, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": content, "more_body": more})
