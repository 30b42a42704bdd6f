"""The other routes, errors on any route, and what never leaves the server."""

import json
from typing import Any

import pytest

from serve.http.errors import KINDS, RETRY_AFTER_S
from serve.http.static_page import FILES, FOLDER

from .fakes import INFO, NAME, FakeEngine, config_of
from .running import app_of, ask, complete, error_of


def test_the_model_is_told_with_what_it_was_certified_for() -> None:
    app = app_of(default_tolerance=0.1)
    (card,) = ask(app, "GET", "/v1/models").json()["data"]
    assert card == ask(app, "GET", f"/v1/models/{NAME}").json()
    assert (card["id"], card["object"], card["owned_by"], card["ready"]) == (NAME, "model", "calm", True)
    assert (card["max_prompt_tokens"], card["max_tokens"], card["rule"]) == (INFO.max_source, INFO.max_target, "own")
    assert card["early_exit"] == {
        "num_layers": 8, "exit_layers": [1, 2, 3, 4, 5, 6, 7], "tolerances": {"risk": [0.05, 0.1]},
        "measure": "softmax", "default_tolerance": 0.1, "default_consistency": "risk", "default_draft_layer": None,
    }  # fmt: skip


def test_a_model_that_was_never_ready_is_told_by_name_alone() -> None:
    engine = FakeEngine()
    engine.state, engine.info = "loading", None
    (card,) = ask(app_of(engine), "GET", "/v1/models").json()["data"]
    assert (card["id"], card["ready"], card["early_exit"], card["max_tokens"]) == (NAME, False, None, None)


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fetc",
    "%2e%2e",
    "demo%00",
    "demo/",
    "http://x/demo",
    "Demo",
    "demo ",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_other_model_can_be_named(name: str) -> None:
    """Fault 41: a fixed text, and nothing is looked up."""
    app = app_of()
    for response in (
        ask(app, "GET", f"/v1/models/{name}"),
        complete(app, model=name),
        complete(app, model=name + "\0"),
    ):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] in ("model_not_found", "not_found")
        assert "passwd" not in response.text and "etc" not in error["message"]
    assert error_of(complete(app, model=name))["message"] == error_of(complete(app, model="x"))["message"]


def test_health_readiness_and_version() -> None:
    app = app_of()
    assert ask(app, "GET", "/healthz").json() == {"status": "ok"}
    assert ask(app, "GET", "/readyz").json() == {"status": "ready"}
    assert set(ask(app, "GET", "/version").json()) == {"name", "version"}


def test_the_page_is_a_fixed_list_of_files() -> None:
    app = app_of()
    for path, (name, kind) in FILES.items():
        response = ask(app, "GET", path)
        assert response.status_code == 200 and response.headers["content-type"] == kind
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in response.headers["content-security-policy"]
    assert {each.name for each in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
    for path in ("/index.html", "/page/index.html", "/../answers.py", "/%2e%2e/app.py"):
        assert ask(app, "GET", path).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_405_and_say_which_there_are(method: str) -> None:
    app = app_of()
    for path in ("/v1/models", "/", "/metrics", "/healthz"):
        response = ask(app, method, path)
        assert response.status_code == 405 and "GET" in response.headers["allow"]
        error_of(response)
    assert ask(app, "GET", "/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/nope", "/v1", "/v1/completions/", "/docs", "/redoc", "/v1/chat/completions", "/v1//models"]
)
def test_unknown_routes_are_404_without_an_echo(path: str) -> None:
    response = ask(app_of(), "GET", path + "?secret=1")
    assert response.status_code == 404
    assert error_of(response)["message"] == "there is no such route; GET /openapi.json lists them"


SECRET = "Tr0ub4dor"
ECHOES: list[dict[str, Any]] = [
    {"prompt": {SECRET: SECRET}},
    {"prompt": [SECRET, 5]},
    {"prompt": [[SECRET]]},
    {"prompt": SECRET * 20000},
    {"prompt": " ".join([SECRET] * 99)},
    {"stop": [SECRET * 99]},
    {"user": {SECRET: 1}},
    {"model": SECRET},
    {f"{SECRET} with a blank": 1},
    {"early_exit": {"policy": SECRET}},
    {"early_exit": SECRET},
    {"logit_bias": {SECRET: 1}},
    {"suffix": SECRET},
    {"seed": SECRET},
    {"stream_options": {SECRET + "\n": 1}, "stream": True},
]


@pytest.mark.parametrize("fields", ECHOES, ids=lambda fields: next(iter(fields)))
def test_no_error_repeats_what_was_sent(fields: dict[str, Any]) -> None:
    """Fault 42."""
    response = complete(app_of(), **fields)
    assert 400 <= response.status_code < 500
    error_of(response)
    assert SECRET not in response.text


def test_a_fault_of_the_servers_own_is_a_500_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 42."""
    import serve.http.completions as module

    def broken(*_: object) -> None:
        raise ZeroDivisionError(f"in {SECRET}")

    monkeypatch.setattr(module, "plan", broken)
    for stream in (False, True):
        response = complete(app_of(), prompt=SECRET, stream=stream)
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error"
        for word in (SECRET, "Traceback", "ZeroDivision", ".py"):
            assert word not in response.text


def test_the_documentation_names_every_field_status_and_limit() -> None:
    """Fault 42: every 4xx and 5xx is documented."""
    document = ask(app_of(key=None, max_body_bytes=5000), "GET", "/openapi.json").json()
    paths = {(path, method) for path, each in document["paths"].items() for method in each}
    assert paths == {
        ("/healthz", "get"), ("/readyz", "get"), ("/version", "get"), ("/metrics", "get"), ("/v1/models", "get"),
        ("/v1/models/{model}", "get"), ("/v1/completions", "post"),
    }  # fmt: skip
    operation = document["paths"]["/v1/completions"]["post"]
    assert {int(status) for status in operation["responses"]} == {200, *KINDS} - {405}
    for status, response in operation["responses"].items():
        assert response["description"]
        assert (int(status) in RETRY_AFTER_S) == ("headers" in response)
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    request = document["components"]["schemas"]["CompletionRequest"]
    assert request["required"] == ["model", "prompt"] and request["additionalProperties"] is False
    assert request["properties"]["model"]["enum"] == [NAME]
    assert all(each.get("description") or "$ref" in json.dumps(each) for each in request["properties"].values())
    assert "greedy" in request["properties"]["temperature"]["description"]
    assert request["properties"]["temperature"]["default"] == 0
    assert "422" not in json.dumps(document)


def test_the_key_is_in_the_documentation_where_there_is_one() -> None:
    headers = {"authorization": "Bearer KEY"}
    document = ask(app_of(key="KEY"), "GET", "/openapi.json", headers=headers).json()
    schemes = document["components"]["securitySchemes"]
    assert {name: scheme["scheme"] for name, scheme in schemes.items()} == {"key": "bearer", "browser": "basic"}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == ("401" in operation["responses"]) == (path != "/healthz")


def test_a_configuration_says_what_it_does_not_take() -> None:
    from calm.errors import ConfigError

    for settings, said in (
        ({"keep_alive_s": 15}, "keep_alive_s"),
        ({"name": "../x"}, "name"),
        ({"host": "http://x"}, "no host name"),
        ({"allowed_hosts": ["x:80"]}, "no host name"),
        ({"dtype": "fp16"}, "choose from fp32, bf16, int8"),
        ({"port": 65536}, "port"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"default_tolerance": 1.0}, "default_tolerance"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"restarts": -1}, "restarts"),
    ):
        with pytest.raises(ConfigError, match=said):
            config_of(**settings)
