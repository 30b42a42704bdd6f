"""The log: one line of JSON for each request, whatever it holds, and nothing that a client meant for the model only."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve.http.logs import JsonLines, log_failure, log_to_stderr

from .fakes import FakeEngine
from .running import app_of, ask, complete

SECRET = 'a "secret"\n{"level": "fake"}\r\x1b[31m\u2028é'
KEY = "k3y-of-somebody"


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What is logged, decoded a line at a time when it is read."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("calm.serve")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)

    class Lines(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([json.loads(line) for line in stream.getvalue().splitlines()])

    yield Lines()
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_is_one_line_with_its_facts(lines: list[dict[str, Any]]) -> None:
    response = complete(app_of(), prompt=["hello", "b"], n=2, temperature=1)
    (line,) = lines
    assert line["event"] == "request" and line["id"] == response.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["ms"] >= 0 and line["level"] == "info" and line["time"].endswith("+00:00")
    assert (line["model"], line["stream"], line["prompts"], line["n"]) == ("demo", False, 2, 2)
    usage = response.json()["usage"]
    assert {name: line[name] for name in usage} == usage
    assert (line["answers"], line["certified"], line["involuntary"]) == (4, 4, 0)
    assert 1 <= line["mean_exit_layer"] <= 8 and 0 <= line["layers_skipped"] < 1


def test_errors_are_logged_with_their_code(lines: list[dict[str, Any]]) -> None:
    app = app_of(key=KEY)
    ask(app, "GET", "/nope%0A")
    ask(app, "GET", "/v1/models", headers={"authorization": f"Bearer {KEY}x"})
    open_app = app_of()
    ask(open_app, "GET", f"/{KEY}")
    complete(open_app, n=0)
    complete(open_app, model="x")
    told = [(line["status"], line["error"], line["route"]) for line in lines]
    assert told == [
        (401, "invalid_api_key", None), (401, "invalid_api_key", None), (404, "not_found", None),
        (400, "invalid_request", "/v1/completions"), (404, "model_not_found", "/v1/completions"),
    ]  # fmt: skip
    assert KEY not in json.dumps(list(lines))


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_not_logged_unless_that_is_asked_for(lines: list[dict[str, Any]], stream: bool) -> None:
    """Fault 43: a line break in a prompt stays inside of one JSON line."""
    complete(app_of(), prompt=SECRET, stream=stream)
    complete(app_of(log_prompts=True), prompt=SECRET, stream=stream)
    complete(app_of(log_prompts=True), prompt=["a", "b"], stream=stream)
    first, second, third = lines
    assert "secret" not in json.dumps(first)
    assert second["prompt"] == SECRET and third["prompt"] == ["a", "b"]


def test_a_line_is_ascii(lines: list[dict[str, Any]]) -> None:
    record = logging.LogRecord("calm", logging.INFO, "x.py", 1, SECRET, None, None)
    record.facts = {"prompt": SECRET, "odd": object()}
    line = JsonLines().format(record)
    assert line.isascii() and line.isprintable()
    assert json.loads(line)["prompt"] == SECRET


def test_a_failure_tells_kind_and_place_and_not_what_it_was_about(lines: list[dict[str, Any]]) -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        log_failure("it failed", error)
    (line,) = lines
    assert (line["event"], line["error"], line["level"]) == ("it failed", "ValueError", "error")
    assert "test_logs.py" in line["at"][-1] and "secret" not in json.dumps(line)


def test_a_fault_of_the_servers_own_is_logged_under_the_requests_id(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import serve.http.completions as module

    def broken(*_: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(module, "plan", broken)
    response = complete(app_of(), prompt=SECRET)
    failure, request = lines
    assert response.headers["x-request-id"] == request["id"] and request["id"] in failure["event"]
    assert failure["error"] == "ZeroDivisionError" and request["status"] == 500
    assert "secret" not in json.dumps([failure, request])


def test_an_engine_that_fails_a_request_is_logged_with_its_reason(lines: list[dict[str, Any]]) -> None:
    from .fakes import Script

    engine = FakeEngine(lambda source, options: Script(failed="the logits are not finite"))
    complete(app_of(engine))
    failure, request = lines
    assert "the logits are not finite" in failure["event"] and "prompt" in failure["event"]
    assert request["error"] == "engine_failed"


def test_every_logger_of_the_process_writes_such_lines(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        log_to_stderr()
        logging.getLogger("uvicorn.error").warning("Invalid\nrequest")
        logging.getLogger("anything").error("x")
        captured = capsys.readouterr()
        told = [json.loads(line)["event"] for line in captured.err.splitlines()]
        assert told == ["Invalid\nrequest", "x"] and captured.out == ""
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
