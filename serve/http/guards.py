"""Who is let in, before any of the request's body is read: well-formed heads, known host names, the right key."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, bad_request, send_error

MAX_HEADERS, MAX_HEAD_BYTES = 100, 16384
ALWAYS_OPEN = "/healthz"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::", "")


class Guard:
    """One check in front of an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request that goes no further."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope)
            except ApiError as error:
                return await send_error(error, scope, send)
        await self._app(scope, receive, send)


class HeadGuard(Guard):
    """Bounds a request's line and headers, and refuses those whose body's length could be read in two ways."""

    def check(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            raise ApiError(431, f"at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of them")
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            close = {"connection": "close"}
            raise ApiError(400, "send content-length or transfer-encoding, not both", headers=close)


class HostGuard(Guard):
    """Answers only to names that are meant, so that no page in a browser can reach it under a name of its own.

    Args:
        host: that the server listens at.
        allowed: further names.
    """

    def __init__(self, app: ASGIApp, host: str, allowed: Collection[str]) -> None:
        super().__init__(app)
        names = {*LOOPBACK, host.strip("[]"), *(name.strip("[]") for name in allowed)} - set(_WILDCARDS)
        self._names = {name.lower() for name in names}

    def check(self, scope: Scope) -> None:
        if scope["path"] == ALWAYS_OPEN:
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _name_of(hosts[0]) not in self._names:
            said = "this server does not go by that host name; start it with allowed_hosts=[NAME]"
            raise bad_request(said, code="unknown_host")


def _name_of(host: str) -> str:
    """Without its port: ``[::1]:8000`` is ``::1``."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name = host
    elif not port.isdecimal():
        return ""
    return name.strip("[]").lower()


class KeyGuard(Guard):
    """Lets in who has the key, on every route but /healthz, unknown ones included; compares in constant time."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        super().__init__(app)
        self._digest = None if key is None else _digest(b"Bearer " + key.encode())

    def check(self, scope: Scope) -> None:
        if self._digest is None or scope["path"] == ALWAYS_OPEN:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(_digest(given[0]), self._digest):
            raise ApiError(401, "send the API key once, as header Authorization: Bearer KEY")


def _digest(value: bytes) -> bytes:
    """Of fixed length, so that not even the length of the key can be timed."""
    return hashlib.sha256(value).digest()
