"""OpenAI's own client against this server."""

from collections.abc import Iterator

import openai
import pytest

from .fakes import NAME, FakeEngine, said_of
from .running import Running, eventually, running

KEY = "k3y-of-somebody"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "calm"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["A", "B"], n=2, best_of=2, logprobs=None, echo=False)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["<A>", "<A>", "<B>", "<B>"]
    assert answer.usage is not None and answer.usage.total_tokens == 12
    assert answer.choices[0].finish_reason == "stop"


def test_early_exit_goes_through_extra_body_and_comes_back_as_an_extra_field(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=NAME, prompt="A", extra_body={"early_exit": {"tolerance": 0.05, "layers": True}}
    )
    early = (answer.choices[0].model_extra or {})["early_exit"]
    assert early == {
        "certified": True, "tokens": 2, "mean_exit_layer": 4.5, "layers_skipped": 0.4375, "exit_layers": [1, 8]
    }  # fmt: skip


def test_a_stream(client: openai.OpenAI) -> None:
    parts = list(
        client.completions.create(
            model=NAME, prompt="a long prompt", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == said_of("a long prompt")
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].choices == [] and parts[-1].usage is not None and parts[-1].usage.prompt_tokens == 4


def test_errors_are_of_the_clients_own_classes(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="A", logprobs=3)
    assert (bad.value.param, bad.value.code) == ("logprobs", "not_offered")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model=NAME, prompt="A")


def test_an_error_in_a_stream_is_raised() -> None:
    engine = FakeEngine()
    engine.hold_at = 2
    with running(engine, request_timeout_s=2.0) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.completions.create(model=NAME, prompt="a long prompt", stream=True)
            with pytest.raises(openai.APIError, match="not finished within 2 s"):
                list(stream)


def test_a_stream_that_is_closed_is_cancelled() -> None:
    engine = FakeEngine()
    engine.hold_at = 2
    with running(engine) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with client.completions.create(model=NAME, prompt="a long prompt", stream=True) as stream:
                assert next(iter(stream)).choices[0].text
            eventually(lambda: engine.submitted[0].cancelled)


def test_too_many_requests_are_retried_by_the_client_after_what_the_server_says() -> None:
    engine = FakeEngine(max_waiting=0)
    with running(engine) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=NAME, prompt="A")
            assert caught.value.response.headers["retry-after"] == "1"
        engine.hold_loading(True)
        engine.state = "loading"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as down:
                client.completions.create(model=NAME, prompt="A")
            assert down.value.status_code == 503
        engine.hold_loading(False)
