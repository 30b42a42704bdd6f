"""Who is let in, before any of the request's body is read: well-formed heads, known host names, the right key."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, bad_request, send_error

MAX_HEADERS, MAX_HEAD_BYTES = 100, 16384
ALWAYS_OPEN = "/healthz"
ASK_IN_BROWSER = 'Basic realm="calm: any user name, the API key as password", charset="UTF-8"'
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
    """Lets in who has the key, on every route but /healthz, unknown ones included; compares in constant time.

    A browser that opens a page cannot send a bearer token, so the key may also be the password of Basic authentication
    (of any user), and a browser is told so where it would open a page. It sends the password along by itself then.

    Args:
        pages: paths that people open in a browser.
    """

    def __init__(self, app: ASGIApp, key: str | None, pages: Collection[str] = ()) -> None:
        super().__init__(app)
        self._digest = None if key is None else _digest(b"Bearer " + key.encode())
        self._pages = frozenset(pages)

    def check(self, scope: Scope) -> None:
        if self._digest is None or scope["path"] == ALWAYS_OPEN:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(_digest(_as_bearer(given[0])), self._digest):
            challenge = {"www-authenticate": ASK_IN_BROWSER} if scope["path"] in self._pages else None
            raise ApiError(401, "send the API key once, as header Authorization: Bearer KEY", headers=challenge)


def _as_bearer(authorization: bytes) -> bytes:
    """The password of Basic authentication as a bearer token; anything else stays."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme != b"Basic":
        return authorization
    try:
        _, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
    except binascii.Error:
        return authorization
    return b"Bearer " + password if colon else authorization


def _digest(value: bytes) -> bytes:
    """Of fixed length, so that not even the length of the key can be timed."""
    return hashlib.sha256(value).digest()
