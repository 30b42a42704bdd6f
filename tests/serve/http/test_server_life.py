"""From loading to leaving: what is answered meanwhile, what is finished, and with which status it ends."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from calm.config import Measure
from calm.errors import CheckpointError, ConfigError
from calm.serve_config import DraftConfig
from serve.http.server import ENGINE_GONE, listen, url_of

from .fakes import NAME, FakeEngine
from .running import PATIENCE_S, Running, eventually, read_all, read_response, request_bytes, running

BODY = {"model": NAME, "prompt": "a long prompt"}


def get(server: Running, path: str) -> tuple[int, Any]:
    with server.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        status, _, body = read_response(connection)
        return status, json.loads(body)


def post(server: Running, **fields: Any) -> tuple[int, dict[str, str], Any]:
    with server.connect() as connection:
        connection.sendall(request_bytes({**BODY, **fields}))
        status, headers, body = read_response(connection)
        return status, headers, json.loads(body)


def test_while_the_model_loads_the_server_says_so() -> None:
    engine = FakeEngine()
    engine.hold_loading(True)
    with running(engine, wait=False) as server:
        eventually(lambda: server.service._web.started and engine.state == "loading")
        assert get(server, "/healthz")[0] == 200
        status, headers, body = post(server)
        assert status == 503 and int(headers["retry-after"]) > 0 and body["error"]["code"] == "not_ready"
        assert get(server, "/readyz")[0] == 503
        engine.hold_loading(False)
        eventually(lambda: get(server, "/readyz")[0] == 200)
        assert post(server)[0] == 200


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason() -> None:
    engine = FakeEngine(load_error=CheckpointError("the folder is damaged"))
    with running(engine) as server:
        server.join()
        assert isinstance(server.error[0], CheckpointError)


def test_a_default_tolerance_has_to_be_certified() -> None:
    for settings in ({"default_tolerance": 0.2}, {"default_tolerance": 0.05, "default_consistency": "textual"}):
        with running(FakeEngine(), **settings_of(settings)) as server:
            server.join()
            assert isinstance(server.error[0], ConfigError) and "not certified" in str(server.error[0])


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (DraftConfig(layer=8), "layer 8 lies outside 1..7"),
        (DraftConfig(layer=2, length=16), "default_draft.length=16 is above the 15 of one round"),
        (DraftConfig(layer=2, measure=Measure.classifier), "needs a trained exit classifier"),
    ],
)
def test_a_default_draft_has_to_fit_the_model(wrong: DraftConfig, line: str) -> None:
    with running(FakeEngine(), default_draft=wrong) as server:
        server.join()
        assert isinstance(server.error[0], ConfigError) and line in str(server.error[0])


def settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    from calm.config import Consistency

    return {name: Consistency(value) if name == "default_consistency" else value for name, value in settings.items()}


def test_a_drain_finishes_what_is_in_flight_and_refuses_what_is_new() -> None:
    """Fault 35: SIGTERM; streams, whole answers and the queue are finished, and new requests get 503."""
    engine = FakeEngine(slots=1)
    engine.hold_at = 2
    with running(engine) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        kept.request("GET", "/version")
        kept.getresponse().read()
        streamed, whole = server.connect(), server.connect()
        streamed.sendall(request_bytes({**BODY, "stream": True}))
        eventually(lambda: engine.steps == 2)
        whole.sendall(request_bytes(BODY))
        eventually(lambda: engine.waiting == 1)
        server.signal()
        eventually(lambda: engine.state == "draining")
        for fields in ({}, {"stream": True}):
            status, headers, body = post(server, **fields)
            assert (status, body["error"]["code"]) == (503, "draining") and int(headers["retry-after"]) > 0
        kept.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        assert kept.getresponse().status == 503
        assert get(server, "/readyz")[0] == 503 and get(server, "/healthz")[0] == 200
        engine.hold_at = None
        text = read_all(streamed).decode()
        assert "data: [DONE]" in text and "error" not in text
        assert json.loads(read_all(whole).partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "<a long prompt>"
        server.join()
        assert server.status == [0]
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        for each in (kept, streamed, whole):
            each.close()


def test_what_is_not_finished_in_time_is_told_and_the_status_says_so() -> None:
    """Fault 35."""
    engine = FakeEngine()
    engine.hold_at = 2
    with running(engine, drain_s=0.3) as server:
        streamed, whole = server.connect(), server.connect()
        streamed.sendall(request_bytes({**BODY, "stream": True}))
        whole.sendall(request_bytes(BODY))
        eventually(lambda: engine.steps == 4)
        server.signal()
        text = read_all(streamed).decode()
        assert "event: error" in text and "engine_gone" in text
        assert read_all(whole).startswith(b"HTTP/1.1 503")
        server.join()
        assert server.status == [128 + signal.SIGTERM]
        streamed.close()
        whole.close()


def test_a_second_signal_leaves_at_once() -> None:
    engine = FakeEngine()
    engine.held = True
    with running(engine, drain_s=600.0) as server:
        whole = server.connect()
        whole.sendall(request_bytes(BODY))
        eventually(lambda: engine.running == 1)
        server.signal(signal.SIGINT)
        eventually(lambda: engine.state == "draining")
        server.signal(signal.SIGINT)  # the same one, told twice
        server.service.signals._first -= 10
        server.signal(signal.SIGINT)
        server.join()
        assert server.status == [128 + signal.SIGINT]
        whole.close()


def test_an_engine_that_dies_fails_what_it_had_and_comes_back_where_it_may() -> None:
    """Fault 35, the server's part: /readyz says so at once, and requests are answered again afterwards."""
    engine = FakeEngine()
    engine.held, engine.restarts = True, 1
    with running(engine) as server:
        engine.hold_loading(True)
        whole = server.connect()
        whole.sendall(request_bytes(BODY))
        eventually(lambda: engine.running == 1)
        server.loop.call_soon_threadsafe(engine.die)
        assert read_response(whole)[0] == 503
        assert get(server, "/readyz")[0] == 503
        engine.held = False
        engine.hold_loading(False)
        eventually(lambda: get(server, "/readyz")[0] == 200)
        assert post(server)[0] == 200
        whole.close()


def test_an_engine_that_does_not_come_back_ends_the_server() -> None:
    """Fault 35."""
    with running(FakeEngine()) as server:
        server.loop.call_soon_threadsafe(server.engine.die)
        server.join()
        assert server.status == [ENGINE_GONE]


@contextmanager
def program(*argv: str) -> Iterator[tuple["subprocess.Popen[str]", int, list[str]]]:
    """The server as a process: it, its port, and the lines of its log so far."""
    command = [sys.executable, "-m", "tests.serve.http.serve_fake", *argv]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    errors = process.stderr
    reader = threading.Thread(target=lambda: [lines.append(line) for line in errors], daemon=True)
    reader.start()
    try:
        told = process.stdout.readline()
        assert told.startswith(f"{NAME} at http://127.0.0.1:"), (told, lines)
        yield process, int(told.rsplit(":", 1)[1]), lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def answered(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(request_bytes(BODY, "connection: close"))
        return read_all(connection)


@pytest.mark.parametrize(
    ("argv", "status", "answer"),
    [(("slow",), 0, b"HTTP/1.1 200"), (("held", "drain_s=0.5"), 128 + signal.SIGTERM, b"HTTP/1.1 503")],
    ids=["finished", "cut off"],
)
def test_sigterm_drains_and_the_exit_status_tells_how_it_went(
    argv: tuple[str, ...], status: int, answer: bytes
) -> None:
    """Fault 35: as a process; and fault 43: all that it says on stderr is JSON, a line each."""
    with program(*argv) as (process, port, lines):
        found: list[bytes] = []
        client = threading.Thread(target=lambda: found.append(answered(port)))
        eventually(lambda: any('"ready"' in line for line in lines))
        client.start()
        eventually(lambda: b"calm_num_requests_running 1.0" in scrape(port))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == status
        client.join()
        assert found[0].startswith(answer)
    events = [json.loads(line)["event"] for line in lines]
    assert "draining" in events and "request" in events


def scrape(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return read_all(connection)


def test_a_connection_sends_the_second_part_of_an_answer_at_once() -> None:
    """It does not wait until the client acknowledges the first, which many systems do after 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of("127.0.0.1", listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {port}.*choose another port="):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen"):
        listen("no-such-host.invalid", 0)
