"""Clients that leave, and clients that do not read: real sockets, and no harm to anybody else."""

import json
import socket
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.http.backend import Source
from serve.options import RequestOptions

from .fakes import NAME, FakeEngine, Script
from .running import Running, eventually, read_all, read_response, request_bytes, running


def body(stream: bool, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "a long prompt", "stream": stream, **fields}


def counted(server: Running, name: str) -> float:
    """A metric's value, as a scrape tells it."""
    with server.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        text = read_response(connection)[2].decode()
    samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
    return sum(each.value for each in samples if each.name == name)


def leave(connection: socket.socket, politely: bool) -> None:
    """With a FIN, or with a reset as a client that crashed."""
    if not politely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


@pytest.mark.parametrize("politely", [True, False], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["before the first token", "in the middle", "in the queue"])
def test_a_client_that_leaves_has_its_requests_cancelled_at_once(where: str, stream: bool, politely: bool) -> None:
    """Fault 30: before the first token, mid-stream, in the queue; streamed and not; and it is counted."""
    engine = FakeEngine(slots=1 if where == "in the queue" else 4)
    engine.held, engine.hold_at = where != "in the middle", 2
    with running(engine) as server:
        first = server.connect()
        if where == "in the queue":
            first.sendall(request_bytes(body(False)))
            eventually(lambda: engine.running == 1)
        connection = server.connect()
        connection.sendall(request_bytes(body(stream, prompt=["a long prompt", "another long one"])))
        begun = 1 if where == "in the queue" else 0
        eventually(lambda: len(engine.submitted) == begun + 2)
        if where == "in the middle":
            eventually(lambda: engine.steps == 4)
            if stream:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        leave(connection, politely)
        eventually(lambda: all(stream.cancelled and stream.over for stream in engine.submitted[begun:]))
        assert counted(server, "calm_requests_cancelled_total") == 2
        assert not any(stream.cancelled for stream in engine.submitted[:begun])
        engine.held, engine.hold_at = False, None
        if where == "in the queue":
            assert read_response(first)[0] == 200
        first.close()
        eventually(lambda: not engine.open and engine.running == engine.waiting == 0)


def test_a_client_that_leaves_while_it_sends_its_body_costs_nothing() -> None:
    with running() as server:
        connection = server.connect()
        connection.sendall(request_bytes(body(False))[:-5])
        connection.close()
        with server.connect() as other:
            other.sendall(request_bytes(body(False)))
            assert read_response(other)[0] == 200
        assert len(server.engine.submitted) == 1


LARGE, MANY = 2**16, 160


def wordy(source: Source, options: RequestOptions) -> Script:
    """Far more text than any buffer between the two holds, for those who ask for it."""
    if source != "much":
        return Script((("x", (5,), (2,)),))
    return Script((("y" * LARGE, (5,), (2,)),) * MANY)


def test_a_client_that_does_not_read_holds_up_nobody_and_is_dropped_when_its_time_is_over() -> None:
    """Fault 31: what it is told waits for no more than its own answer is long."""
    engine = FakeEngine(wordy)
    with running(engine, request_timeout_s=3.0) as server:
        lazy = server.connect(receive_buffer=4096)
        lazy.sendall(request_bytes(body(True, prompt="much")))
        eventually(lambda: engine.submitted and engine.submitted[0].over)  # the engine was not held up
        for _ in range(5):
            with server.connect() as other:
                other.sendall(request_bytes(body(True), "connection: close"))
                assert b"data: [DONE]" in read_all(other)
        assert server.service._app.count >= 1
        eventually(lambda: server.service._app.count == 0)
        eventually(lambda: not server.service._web.server_state.connections)
        found = read_all(lazy)
        lazy.close()
        assert len(found) < MANY * LARGE and b"[DONE]" not in found


def test_a_client_that_reads_slowly_gets_all_of_it() -> None:
    """Fault 31."""
    with running(FakeEngine(wordy), request_timeout_s=60.0) as server, server.connect(receive_buffer=2**16) as slow:
        slow.sendall(request_bytes(body(True, prompt="much"), "connection: close"))
        found = read_all(slow)
        assert found.count(b"y" * LARGE) == MANY and b"data: [DONE]" in found


def test_whole_answers_that_nobody_reads_are_dropped_too() -> None:
    """Fault 31, without a stream: the connection's own deadline."""
    with running(FakeEngine(wordy), request_timeout_s=2.0) as server:
        lazy = server.connect(receive_buffer=4096)
        lazy.sendall(request_bytes(body(False, prompt="much")))
        eventually(lambda: server.engine.submitted and server.engine.submitted[0].over)
        eventually(lambda: not server.service._web.server_state.connections)
        found = read_all(lazy)
        lazy.close()
        assert len(found) < MANY * LARGE


def test_an_answer_is_complete_json_where_it_is_read() -> None:
    with running(FakeEngine(wordy)) as server, server.connect() as connection:
        connection.sendall(request_bytes(body(False, prompt="much")))
        status, _, content = read_response(connection)
        assert status == 200 and len(json.loads(content)["choices"][0]["text"]) == MANY * LARGE
