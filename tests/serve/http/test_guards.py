"""Who is let in: the key, host names, heads, bodies and their declared kinds."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from calm.errors import ConfigError
from serve.http.api_key import VARIABLE, read_key

from .fakes import NAME, FakeEngine
from .running import app_of, ask, complete, error_of

KEY = "s3cret-KEY_0123456789"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{NAME}"),
    ("POST", "/v1/completions"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/page/app.js"),
    ("GET", "/no/such/route"),
    ("DELETE", "/v1/completions"),
    ("OPTIONS", "/v1/models"),
]


def raw(app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> httpx.Response:
    """One request whose headers are exactly these."""

    async def one() -> httpx.Response:
        sent: list[Message] = []
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()
            return unread.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2), "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        await app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=content)

    return asyncio.run(one())


HOST = (b"host", b"localhost:8000")


def basic(user: str, password: str) -> bytes:
    return b"Basic " + base64.b64encode(f"{user}:{password}".encode())


WRONG_KEYS = {
    "none": [],
    "wrong": [b"Bearer wrong"],
    "empty": [b""],
    "no key": [b"Bearer "],
    "no scheme": [KEY.encode()],
    "a scheme in small letters": [b"bearer " + KEY.encode()],
    "a password that is not encoded": [b"Basic " + KEY.encode()],
    "a wrong password": [basic("user", KEY + "x")],
    "the key as user": [basic(KEY, "")],
    "no colon": [b"Basic " + base64.b64encode(KEY.encode())],
    "two words of Basic": [basic("user", KEY) + b" x"],
    "basic in small letters": [basic("user", KEY).lower()],
    "as token and as password": [b"Bearer " + KEY.encode(), basic("user", KEY)],
    "two blanks": [b"Bearer  " + KEY.encode()],
    "one letter more": [b"Bearer " + KEY.encode() + b"x"],
    "one letter less": [b"Bearer " + KEY.encode()[:-1]],
    "other case": [b"Bearer " + KEY.lower().encode()],
    "no ascii": [b"Bearer \xff\xfe"],
    "right and wrong": [b"Bearer " + KEY.encode(), b"Bearer wrong"],
    "right twice": [b"Bearer " + KEY.encode()] * 2,
    "very long": [b"Bearer " + b"x" * 15000],
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_without_the_right_key_every_route_is_closed(name: str) -> None:
    """Fault 38: 401 everywhere, on unknown routes and methods too; only /healthz is open."""
    app = app_of(key=KEY)
    headers = [HOST, *((b"authorization", value) for value in WRONG_KEYS[name])]
    for method, path in ROUTES:
        response = raw(app, method, path, headers)
        assert response.status_code == 401, (method, path)
        scheme = "Basic realm=" if path == "/" or path.startswith("/page/") else "Bearer"
        assert response.headers["www-authenticate"].startswith(scheme)
        assert error_of(response)["code"] == "invalid_api_key"
        assert KEY not in response.text
    assert raw(app, "GET", "/healthz", headers).status_code == 200


def test_a_key_of_a_megabyte_is_refused_too() -> None:
    """Fault 38: this one is stopped as a head that is too large."""
    headers = [HOST, (b"authorization", b"Bearer " + b"x" * 2**20)]
    for method, path in ROUTES:
        response = raw(app_of(key=KEY), method, path, headers)
        assert response.status_code == 431 and error_of(response)["code"] == "headers_too_large"


@pytest.mark.parametrize("shown", [b"Bearer " + KEY.encode(), basic("", KEY), basic("anybody", KEY)])
def test_with_the_right_key_every_route_answers(shown: bytes) -> None:
    """Fault 38; a browser shows the key as a password."""
    app = app_of(key=KEY)
    statuses = [ask(app, *each, headers={"authorization": shown.decode()}).status_code for each in ROUTES]
    assert statuses == [200, 200, 415, 200, 200, 200, 200, 200, 200, 404, 405, 405]


def test_nothing_of_a_body_is_read_before_the_key_was_seen() -> None:
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    response = ask(app_of(key=KEY), "POST", "/v1/completions", content=endless())
    assert response.status_code == 401


def test_the_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    """Fault 38: never from the command line; and no process that is started later inherits it."""
    environment = {VARIABLE: f" {KEY}\n", "OTHER": "x"}
    assert read_key(None, environment) == KEY
    assert environment == {"OTHER": "x"}
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_key(str(file), {}) == KEY
    assert read_key(None, {}) is None


@pytest.mark.parametrize("text", ["", " \n", "two words", "tab\tin it", "é", "x" * 513, "a\nb"])
def test_keys_that_cannot_stand_in_a_header_are_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    for arguments in ((None, {VARIABLE: text}), (str(tmp_path / "key"), {})):
        with pytest.raises(ConfigError, match="CALM_API_KEY|api_key_file") as caught:
            read_key(*arguments)
        assert not text.strip() or text.strip() not in str(caught.value)


def test_two_keys_and_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        read_key(str(tmp_path / "key"), {VARIABLE: KEY})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "none"), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "binary"), {})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:8000", 200),
        (b"127.0.0.1:1", 200),
        (b"[::1]:8000", 200),
        (b"[::1]", 200),
        (b"calm.example.org:80", 200),
        (b"10.1.2.3:8000", 200),
        (b"evil.example.org", 400),
        (b"localhost.evil.example.org", 400),
        (b"localhost:8000@evil.example.org", 400),
        (b"localhost:x", 400),
        (b"localhost:", 400),
        (b"::1", 400),
        (b"", 400),
        (b"127.0.0.1.", 400),
        (b"\xff", 400),
    ],
)
def test_only_known_host_names_are_answered(host: bytes, status: int) -> None:
    """Fault 40: a page in somebody's browser cannot reach the server under a name of its own."""
    app = app_of(host="10.1.2.3", allowed_hosts=["calm.example.org"])
    response = raw(app, "GET", "/v1/models", [(b"host", host)])
    assert response.status_code == status
    if status == 400:
        assert error_of(response)["code"] == "unknown_host" and "evil" not in response.text


def test_no_host_and_two_hosts_are_refused_and_the_health_check_needs_none() -> None:
    app = app_of()
    for headers in ([], [HOST, HOST]):
        assert raw(app, "GET", "/version", headers).status_code == 400
        assert raw(app, "GET", "/healthz", headers).status_code == 200


def test_a_server_at_every_address_still_wants_a_known_name() -> None:
    app = app_of(host="0.0.0.0")
    assert raw(app, "GET", "/version", [(b"host", b"0.0.0.0")]).status_code == 400
    assert raw(app, "GET", "/version", [HOST]).status_code == 200


def test_heads_are_bounded_in_number_and_bytes() -> None:
    """Fault 40: 2,000 headers, 16 kB of them, and a long address."""
    app = app_of()
    assert raw(app, "GET", "/version", [HOST, *[(b"x", b"y")] * 99]).status_code == 200
    for headers in ([HOST, *[(b"x", b"y")] * 2000], [HOST, (b"x", b"y" * 16384)]):
        response = raw(app, "GET", "/version", headers)
        assert response.status_code == 431 and error_of(response)["code"] == "headers_too_large"
    assert raw(app, "GET", "/" + "x" * 16400, [HOST]).status_code == 431


def test_a_length_that_can_be_read_in_two_ways_is_refused() -> None:
    """Fault 40: content-length and transfer-encoding together smuggle requests through proxies."""
    headers = [HOST, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]
    response = raw(app_of(), "POST", "/v1/completions", headers)
    assert response.status_code == 400 and response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("abc-DEF_123", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("a b", False),
        ("a\x1fb", False),
        ('"}\\', False),
        ("é", False),
    ],
)
def test_a_request_id_is_the_clients_own_where_it_is_plain(name: str, taken: bool) -> None:
    """Fault 40: nothing of a header's that could break a line or a log is echoed."""
    response = raw(app_of(), "GET", "/version", [HOST, (b"x-request-id", name.encode("utf-8"))])
    given = response.headers["x-request-id"]
    assert (given == name) == taken
    assert taken or (len(given) == 32 and given.isalnum())


def test_every_answer_has_a_request_id_and_two_of_a_clients_are_none() -> None:
    app = app_of(key=KEY)
    ids = {
        raw(app, *each, [HOST, (b"x-request-id", b"a"), (b"x-request-id", b"b")]).headers["x-request-id"]
        for each in ROUTES
    }
    assert len(ids) == len(ROUTES) and not ids & {"a", "b"}


JSON_BODY = json.dumps({"model": NAME, "prompt": "a"}).encode()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (b"application/json", 200),
        (b"Application/JSON; charset=UTF-8", 200),
        (b'application/json;charset="utf-8"', 200),
        (None, 415),
        (b"", 415),
        (b"text/plain", 415),
        (b"application/x-www-form-urlencoded", 415),
        (b"multipart/form-data; boundary=x", 415),
        (b"application/json; charset=latin-1", 415),
        (b"application/json, text/plain", 415),
        (b"application/jsonp", 415),
        (b"application/vnd.api+json", 415),
    ],
)
def test_only_plain_json_is_read(kind: bytes | None, status: int) -> None:
    """Fault 39: a wrong or absent content type."""
    headers = [HOST, *([] if kind is None else [(b"content-type", kind)])]
    response = raw(app_of(), "POST", "/v1/completions", headers, JSON_BODY)
    assert response.status_code == status
    assert status == 200 or error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x"])
def test_packed_bodies_are_not_read(encoding: str) -> None:
    """Fault 39: gzip among them, so no bomb is unpacked."""
    headers = {"content-type": "application/json", "content-encoding": encoding}
    assert ask(app_of(), "POST", "/v1/completions", content=JSON_BODY, headers=headers).status_code == 415
    headers["content-encoding"] = "identity"
    assert ask(app_of(), "POST", "/v1/completions", content=JSON_BODY, headers=headers).status_code == 200


def test_two_content_types_are_none() -> None:
    headers = [HOST, (b"content-type", b"application/json"), (b"content-type", b"application/json")]
    assert raw(app_of(), "POST", "/v1/completions", headers, JSON_BODY).status_code == 415


def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    """Fault 39: 413 before anything is buffered."""

    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-type": "application/json", "content-length": "1001"}
    response = ask(app_of(max_body_bytes=1000), "POST", "/v1/completions", content=endless(), headers=headers)
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"


def test_a_body_in_pieces_is_refused_at_the_piece_that_is_too_much() -> None:
    """Fault 39, chunked: no more of it is kept than the limit and a piece."""
    read = [0]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(1000):
            read[0] += 100
            yield b" " * 100

    headers = {"content-type": "application/json"}
    response = ask(app_of(max_body_bytes=1000), "POST", "/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert read[0] <= 1200


def test_a_body_at_the_limit_is_taken() -> None:
    body = JSON_BODY + b" " * (1000 - len(JSON_BODY))
    headers = {"content-type": "application/json"}
    app = app_of(max_body_bytes=1000)
    assert ask(app, "POST", "/v1/completions", content=body, headers=headers).status_code == 200
    assert ask(app, "POST", "/v1/completions", content=body + b" ", headers=headers).status_code == 413


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    headers = {"content-type": "application/json"}
    response = ask(app_of(body_timeout_s=0.05), "POST", "/v1/completions", content=slow(), headers=headers)
    assert response.status_code == 408 and error_of(response)["code"] == "body_timeout"


def test_the_time_for_a_body_is_not_the_time_for_an_answer() -> None:
    engine = FakeEngine()
    engine.held = True
    response = complete(app_of(engine, body_timeout_s=0.02, request_timeout_s=0.1))
    assert response.status_code == 504
