"""Real sockets: idle and slow clients, heads that are no heads, and connections that are too many."""

import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from calm.serve_config import ServeLimits
from serve.http.connection import ConnectionLimits, connection_class

from .fakes import NAME
from .running import PATIENCE_S, Running, eventually, read_all, read_response, request_bytes, running

BODY = {"model": NAME, "prompt": "a"}
HEAD_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(head_timeout_s=HEAD_S, body_timeout_s=HEAD_S, max_body_bytes=100_000) as server:
        yield server


def exchange(server: Running, data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with server.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def test_a_connection_is_kept_for_many_requests(server: Running) -> None:
    """Case 10, without its waits: twenty rounds on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sockets = set()
    for round_ in range(20):
        body = json.dumps({**BODY, "stream": bool(round_ % 2)})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        sockets.add(connection.sock)
    connection.close()
    assert len(sockets) == 1


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs() -> None:
    """Case 10: uvicorn closes after five seconds, aiohttp's clients keep theirs for fifteen."""
    from calm.errors import ConfigError

    from .fakes import config_of

    assert config_of().keep_alive_s > 15
    with pytest.raises(ConfigError, match="keep_alive_s"):
        config_of(keep_alive_s=14)


@pytest.mark.slow
def test_a_post_after_seven_and_fourteen_seconds_finds_its_connection_open() -> None:
    """Case 10: twenty rounds, ten connections side by side, and no reset."""
    with running(keep_alive_s=16) as server:
        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(10)]
        for wait in (0, 7, 14):
            time.sleep(wait)
            for connection in connections:
                before = connection.sock
                connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
                response = connection.getresponse()
                assert response.status == 200 and response.read()
                assert before is None or connection.sock is before
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: "], ids=["nothing", "half"]
)
def test_a_head_that_does_not_come_is_waited_for_only_so_long(server: Running, sent: bytes) -> None:
    """Fault 40: a connection without a request, and half of a header."""
    with server.connect() as connection:
        connection.sendall(sent)
        begun = time.monotonic()
        assert read_all(connection) == b""
        assert HEAD_S * 0.8 < time.monotonic() - begun < 30


def test_a_head_that_comes_a_byte_at_a_time_is_cut_off_all_the_same(server: Running) -> None:
    """Fault 40: every byte is in time and the head is not; also on a connection that had a request before."""
    with server.connect() as connection:
        connection.sendall(request_bytes(BODY))
        assert read_response(connection)[0] == 200
        begun = time.monotonic()
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() - begun < 60:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - begun >= HEAD_S * 0.8
    eventually(lambda: not server.service._web.server_state.connections)


def test_a_body_that_comes_too_slowly_is_a_408_and_its_connection_ends(server: Running) -> None:
    """Fault 40."""
    with server.connect() as connection:
        connection.sendall(request_bytes(BODY)[:-3])
        status, headers, body = read_response(connection)
        assert status == 408 and json.loads(body)["error"]["code"] == "body_timeout"


MALFORMED = {
    "no http": b"hello\r\n\r\n",
    "a header without a name": b"GET /version HTTP/1.1\r\nhost: localhost\r\n: x\r\n\r\n",
    "a line break in a value": b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: a\rb\r\n\r\n",
    "a NUL in a value": b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\n\r\n",
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"
    ),
    "a length below zero": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    "a length that is no number": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0x5\r\n\r\n",
    "length and chunks": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunks packed in another way": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n"
    ),
    "a chunk without a length": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nxyz\r\n"
    ),
    "too many headers": b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 2000 + b"\r\n",
    "a long header": b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
    "a very long header": b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 2**20 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_sound_request_is_one_400_or_431_and_the_end(server: Running, name: str) -> None:
    """Fault 40: smuggling, line breaks in values, heads that are too large; and fault 39, a body that is cut off."""
    with server.connect() as connection:
        connection.sendall(MALFORMED[name])
        connection.shutdown(socket.SHUT_WR)
        found = read_all(connection)
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"431"), found
    assert found.count(b"HTTP/1.1") == 1
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"evil" not in body and b"xyz" not in body
    with server.connect() as connection:
        connection.sendall(request_bytes(BODY))
        assert read_response(connection)[0] == 200


def test_a_second_request_behind_a_smuggled_body_is_not_answered(server: Running) -> None:
    """Fault 40."""
    hidden = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % (len(hidden) + 5)
    )
    found = exchange(server, head + hidden)
    assert found.count(b"HTTP/1.1") == 1 and b"400" in found.split(b"\r\n")[0] and b'"ok"' not in found


def test_a_large_body_is_answered_before_it_was_sent(server: Running) -> None:
    """Fault 39: 413 by the declared length alone, and for chunks as soon as they are too much."""
    with server.connect() as connection:
        head = request_bytes(BODY).split(b"content-length")[0]
        connection.sendall(head + b"content-length: 1000000000\r\n\r\n")
        status, _, body = read_response(connection)
        assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
    with server.connect() as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        connection.setblocking(True)
        while sent < 200_000:
            connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
            sent += 4096
        assert read_response(connection)[0] == 413


def test_a_refusal_reaches_a_client_that_sends_on_and_would_close(server: Running) -> None:
    """Fault 39: not a reset, on which clients give up before they have read anything."""
    head = request_bytes(BODY).split(b"content-length")[0] + b"connection: close\r\ncontent-length: 3000000\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        assert select.select([connection], [], [], PATIENCE_S)[0]  # the answer is there before the body
        for _ in range(30):
            connection.sendall(b" " * 100_000)
        assert read_response(connection)[0] == 413
        assert read_all(connection) == b""


def test_after_a_refusal_the_rest_of_a_small_body_is_read_away_and_the_connection_goes_on(server: Running) -> None:
    request = request_bytes(BODY).replace(b"application/json", b"text/plain")
    with server.connect() as connection:
        connection.sendall(request[:-5])
        assert read_response(connection)[0] == 415
        connection.sendall(request[-5:])
        connection.sendall(request_bytes(BODY))
        assert read_response(connection)[0] == 200


def test_requests_that_come_together_are_answered_in_order(server: Running) -> None:
    with server.connect() as connection:
        for number in range(3):
            headers = ["connection: close"] if number == 2 else []
            connection.sendall(request_bytes({**BODY, "prompt": str(number)}, *headers))
        found = read_all(connection)
    places = [found.index(b'"<%d>"' % number) for number in range(3)]
    assert found.count(b"HTTP/1.1 200") == 3 and places == sorted(places)


def test_more_connections_than_there_may_be_are_answered_503_and_more_yet_are_closed() -> None:
    """Fault 32: with Retry-After; and the first ones are served meanwhile."""
    with running(limits=ServeLimits(connections=3)) as server:
        held = [server.connect() for _ in range(3)]
        eventually(lambda: len(server.service._web.server_state.connections) == 3)
        extra = server.connect()
        extra.sendall(request_bytes(BODY))
        status, headers, body = read_response(extra)
        assert status == 503 and int(headers["retry-after"]) > 0
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        held[0].sendall(request_bytes(BODY))
        assert read_response(held[0])[0] == 200
        more = [server.connect() for _ in range(3)]
        with pytest.raises((ConnectionResetError, AssertionError)):
            more[-1].sendall(request_bytes(BODY))
            read_response(more[-1])
        for connection in (*held, *more):
            connection.close()
        eventually(lambda: len(server.service._web.server_state.connections) == 1)
        extra.sendall(request_bytes(BODY))
        assert read_response(extra)[0] == 200
        extra.close()


def test_what_a_connection_may_take_is_a_setting() -> None:
    limits = ConnectionLimits(most=1, head_s=2.0, write_s=3.0, linger_s=4.0)
    made: Any = connection_class(limits)
    assert made.limits is limits
