"""Bounds a request's body in size and time while it is read; what is too large is refused before it is kept."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, send_error


class BodyLimit:
    """Pure ASGI. The application's ``receive`` raises ApiError (413, 408); a declared length is refused unread.

    Args:
        max_bytes: of a body, declared or not.
        timeout_s: from the request's head to the end of its body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self._max_bytes:
            return await send_error(self._too_large(), scope, send)
        until = asyncio.get_running_loop().time() + self._timeout_s
        left, over = self._max_bytes, False

        async def bounded() -> Message:
            nonlocal left, over
            if over:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self._timeout_s:g} s") from None
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                over = not message.get("more_body", False)
                if left < 0:
                    raise self._too_large()
            return message

        await self._app(scope, bounded, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body has at most {self._max_bytes} bytes")
