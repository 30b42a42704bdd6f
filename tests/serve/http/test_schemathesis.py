"""Fault 42: the server does what its own documentation says, for requests that fit it and for those that do not."""

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from serve.http.errors import KINDS

from .running import app_of, ask, error_of

APP = app_of(allowed_hosts=["testserver"])
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# What two fields or the model decide together is in no schema: best_of = n, ids of the vocabulary, a prompt's length.
BEYOND_SCHEMAS = [positive_data_acceptance]


@SCHEMA.parametrize()
@QUICK
def test_the_server_is_as_documented(case: schemathesis.Case) -> None:
    case.call_and_validate(excluded_checks=BEYOND_SCHEMAS)


GOOD = b'{"model": "demo", "prompt": ["a", "b"], "n": 2, "stop": "x", "early_exit": {"policy": "full", "layers": true}}'


@given(st.data())
@settings(QUICK, max_examples=150)
def test_malformed_bytes_are_a_documented_error_or_an_answer(data: st.DataObject) -> None:
    """Fault 42: also against malformed bytes: a sound body with bytes cut out, put in and changed."""
    body = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(place, min(len(body), place + 8)))
        body[place:end] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b'"', b"{", b"]", b",", b"\\u", b"9" * 30])
        )
    headers = {"content-type": "application/json"}
    response: httpx.Response = ask(APP, "POST", "/v1/completions", content=bytes(body), headers=headers)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.status_code in KINDS and error_of(response)
