"""POST /v1/completions, whole answers: order, sums, seeds, early exit, and what is refused by name."""

import json
from typing import Any

import pytest

from calm.config import Measure
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.policies import Full, Static
from calm.serve_config import DraftConfig, ServeConfig
from serve.http.backend import Source
from serve.http.plan import derived
from serve.options import RequestOptions
from serve.requests import Reason

from .fakes import NAME, FakeEngine, Script, info_with, said_of
from .running import app_of, ask, complete, error_of


def test_an_answer_has_openais_form_and_says_how_early_its_tokens_left() -> None:
    response = complete(app_of(), prompt="hello world", early_exit={"policy": "full"})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["object"] == "text_completion" and body["model"] == NAME and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["logprobs"]) == (0, "<hello world>", None)
    assert choice["finish_reason"] == "stop"
    # 13 characters: five tokens from layers 1 to 5, and EOS from layer 8
    early = {"certified": True, "tokens": 6, "mean_exit_layer": round(23 / 6, 4), "layers_skipped": 0.5208}
    assert choice["early_exit"] == early
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_lists_of_prompts_with_several_choices_keep_their_order() -> None:
    """Case 09: index = i*n + j, in list order; usage summed."""
    body = complete(app_of(), prompt=["A", "B", "A"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in body["choices"]] == ["<A>", "<A>", "<B>", "<B>", "<A>", "<A>"]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


def test_ids_and_lists_of_ids_are_prompts_too() -> None:
    app = app_of()
    assert [each["text"] for each in complete(app, prompt=[5, 6, 1]).json()["choices"]] == ["<5 6 1>"]
    both = complete(app, prompt=[[5, 1], [7, 1]]).json()["choices"]
    assert [each["text"] for each in both] == ["<5 1>", "<7 1>"]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[5, 1], []], "prompt[1]"),
        (["a", [5, 1]], "prompt[1]"),
        ([[5, 1], "a"], "prompt[1]"),
        ([5, "a"], "prompt"),
        (["a", 5], "prompt[1]"),
        (["a"] * 100_000, "prompt"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([None], "prompt[0]"),
        ([{"a": 1}], "prompt[0]"),
        ([[[5]]], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (5, "prompt"),
        (None, "prompt"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_one_bad_prompt_refuses_the_call_and_is_named(prompt: Any, named: str) -> None:
    """Case 09, and faults 26 and 29: empty, mixed and too many prompts each give one clear 400."""
    engine = FakeEngine()
    response = complete(app_of(engine), prompt=prompt)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == named and error["message"].startswith(named)
    assert engine.submitted == []


@pytest.mark.parametrize("ids", [[100], [-1], [5, 10**60], [5, True], [5, 1.0], [5, "6"], [[5, 100]]])
def test_ids_outside_the_vocabulary_are_refused(ids: Any) -> None:
    """Fault 29: out-of-vocabulary, negative, and no ids at all."""
    error = error_of(complete(app_of(), prompt=ids))
    assert "its id number" in error["message"] and "from 0 to 99" in error["message"]


@pytest.mark.parametrize("text", ["</s>", "<pad><extra_id_0>", "a\x00b\x1b[2J", "  ", "e\u0301\u2028🙂"])
def test_odd_texts_are_answered_as_text(text: str) -> None:
    """Fault 26: control characters and the spelling of control tokens reach the engine as they are."""
    response = complete(app_of(), prompt=text)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == said_of(text)


def test_a_prompt_at_the_limit_is_answered_and_one_above_is_refused_with_both_numbers() -> None:
    """Fault 27."""
    engine = FakeEngine()
    app = app_of(engine)
    assert complete(app, prompt=" ".join(["w"] * 15)).status_code == 200
    assert complete(app, prompt=[5] * 16).status_code == 200
    for prompt in (" ".join(["w"] * 16), [5] * 17):
        response = complete(app, prompt=prompt)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "prompt" and "17" in error["message"] and "16" in error["message"]
    response = complete(app, prompt=["w", " ".join(["w"] * 16)])
    assert response.status_code == 400 and error_of(response)["param"] == "prompt[1]"


def test_truncate_cuts_and_keeps_the_last_id() -> None:
    """Fault 27: no silent truncation unless it is asked for."""
    engine = FakeEngine()
    app = app_of(engine)
    assert complete(app, prompt=" ".join(["w"] * 30), truncate=True).status_code == 200
    assert engine.submitted[-1].options.truncate
    assert complete(app, prompt=[*range(5, 35), 1], truncate=True).status_code == 200
    assert engine.submitted[-1].source == (*range(5, 20), 1)


def test_a_text_of_too_many_bytes_never_reaches_the_engine() -> None:
    """Fault 27: rejected by bytes before it is tokenised."""
    engine = FakeEngine()
    app = app_of(engine, max_prompt_bytes=1000)
    assert complete(app, prompt="é" * 500, truncate=True).status_code == 200
    response = complete(app, prompt=["a", "é" * 501], truncate=True)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt[1]", "prompt_too_long")
    assert "1002" in error["message"] and "1000" in error["message"]
    assert len(engine.submitted) == 1


def test_greedy_choices_of_a_prompt_are_equal_and_made_once() -> None:
    engine = FakeEngine()
    body = complete(app_of(engine), n=3, seed=7).json()
    assert [choice["text"] for choice in body["choices"]] == ["<a>"] * 3
    assert len(engine.submitted) == 1


def test_drawn_choices_have_seeds_of_their_own_that_follow_from_the_calls() -> None:
    def texts(**fields: Any) -> list[str]:
        return [choice["text"] for choice in complete(app_of(), temperature=1, **fields).json()["choices"]]

    three = texts(n=3, seed=7)
    assert three == [f"<a>#{derived(7, j)}" for j in range(3)] and len(set(three)) == 3
    assert three[0] == "<a>#7" == texts(seed=7)[0]
    assert texts(n=3, seed=7) == three and texts(n=3, seed=8) != three
    assert texts(n=2, seed=7, prompt=["b", "a"])[2:] == three[:2]
    assert texts(n=2) == ["<a>#None"] * 2  # the engine draws differently for each request


@pytest.mark.parametrize(("reason", "told"), [(Reason.eos, "stop"), (Reason.stop, "stop"), (Reason.length, "length")])
def test_finish_reasons(reason: Reason, told: str) -> None:
    engine = FakeEngine(lambda source, options: Script((("x", (5,), (2,)),), rest="y", reason=reason, certified=False))
    (choice,) = complete(app_of(engine)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["early_exit"]["certified"]) == ("xy", told, False)


def test_options_reach_the_engine_as_asked() -> None:
    engine = FakeEngine()
    fields = {
        "max_tokens": 20, "min_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": -3, "stop": ["x", "yy"],
        "ignore_eos": True, "truncate": True,
    }  # fmt: skip
    assert complete(app_of(engine), **fields).status_code == 200
    given = engine.submitted[0].options
    assert {name: getattr(given, name) for name in fields} == {**fields, "stop": ("x", "yy")}
    assert complete(app_of(engine), **dict.fromkeys(fields)).status_code == 200  # null is the default
    assert engine.submitted[1].options == RequestOptions(policy=Full(), truncate=False)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, {"policy": Full()}),
        ({"layers": True}, {"policy": Full()}),
        ({"policy": "full"}, {"policy": Full()}),
        ({"policy": "static", "layer": 3}, {"policy": Static(3)}),
        ({"policy": "certified"}, {"tolerance": 0.05}),
        ({"threshold": 0.7}, {"threshold": 0.7}),
        ({"threshold": 1, "measure": "state"}, {"threshold": 1.0, "measure": "state"}),
        ({"tolerance": 0.1, "consistency": "textual"}, {"tolerance": 0.1, "consistency": "textual"}),
        ({"draft": {"layer": 2}}, {"draft": Draft(2)}),
        (
            {"draft": {"layer": 2, "length": 6, "measure": "state", "threshold": 0.9}},
            {"draft": Draft(2, 6, Measure.state, 0.9)},
        ),
    ],
)
def test_early_exit_says_how_deep_tokens_go(asked: Any, given: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert complete(app_of(engine), early_exit=asked).status_code == 200
    assert engine.submitted[0].options == RequestOptions(truncate=False, **given)


def test_a_default_tolerance_is_for_calls_that_ask_for_nothing() -> None:
    engine = FakeEngine()
    app = app_of(engine, default_tolerance=0.1)
    for asked, given in (
        (None, {"tolerance": 0.1}),
        ({"layers": True}, {"tolerance": 0.1}),
        ({"policy": "certified"}, {"tolerance": 0.1}),
        ({"policy": "full"}, {"policy": Full()}),
        ({"tolerance": 0.05}, {"tolerance": 0.05}),
    ):
        assert complete(app, early_exit=asked).status_code == 200
        assert engine.submitted[-1].options == RequestOptions(truncate=False, **given)


def test_a_default_draft_is_for_greedy_calls_that_ask_for_nothing() -> None:
    engine = FakeEngine()
    app = app_of(engine, default_draft=DraftConfig(2, 6, Measure.softmax, 0.2))
    draft = {"draft": Draft(2, 6, Measure.softmax, 0.2)}
    for fields, given in (
        ({}, draft),
        ({"early_exit": {"layers": True}}, draft),
        ({"early_exit": {"policy": "full"}}, {"policy": Full()}),
        ({"early_exit": {"draft": {"layer": 3}}}, {"draft": Draft(3)}),
        ({"temperature": 0.5}, {"policy": Full(), "temperature": 0.5}),
        ({"min_tokens": 2}, {"policy": Full(), "min_tokens": 2}),
    ):
        assert complete(app, **fields).status_code == 200
        assert engine.submitted[-1].options == RequestOptions(truncate=False, **given)


@pytest.mark.parametrize("settings", [{"length": 5}, {"layer": 0}, {"layer": 1, "measure": Measure.state}], ids=str)
def test_a_default_draft_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="draft"):
        DraftConfig(**settings)
    with pytest.raises(ConfigError, match="exclude each other"):
        ServeConfig(default_tolerance=0.1, default_draft=DraftConfig(1))


def test_layers_are_told_a_token_where_they_are_asked_for() -> None:
    (choice,) = complete(app_of(), early_exit={"policy": "full", "layers": True}).json()["choices"]
    assert choice["early_exit"]["exit_layers"] == [1, 8]
    (choice,) = complete(app_of(), early_exit={"policy": "full", "layers": False}).json()["choices"]
    assert "exit_layers" not in choice["early_exit"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "early_exit"),
        ({"policy": "full", "threshold": 0.5}, "early_exit"),
        ({"threshold": 0.5, "tolerance": 0.1}, "early_exit"),
        ({"policy": "oracle"}, "early_exit.policy"),
        ({"policy": "static"}, "early_exit.layer"),
        ({"policy": "static", "layer": 9}, "early_exit.layer"),
        ({"policy": "skip_schedule"}, "early_exit.policy"),
        ({"policy": "static", "layer": 0}, "early_exit.layer"),
        ({"threshold": 0.5, "layer": 3}, "early_exit.layer"),
        ({"threshold": -1}, "early_exit.threshold"),
        ({"threshold": 2}, "early_exit.threshold"),
        ({"tolerance": 0}, "early_exit.tolerance"),
        ({"tolerance": "0.1"}, "early_exit.tolerance"),
        ({"policy": "full", "measure": "state"}, "early_exit.measure"),
        ({"threshold": 0.5, "measure": "gap"}, "early_exit.measure"),
        ({"policy": "certified", "consistency": "textual"}, "early_exit"),
        ({"threshold": 0.5, "layers": 1}, "early_exit.layers"),
        ({"draft": {"layer": 2}, "policy": "full"}, "early_exit"),
        ({"draft": {"layer": 2}, "measure": "state"}, "early_exit.measure"),
        ({"draft": {"layer": 8}}, "early_exit.draft"),
        ({"draft": {"layer": 1, "measure": "state"}}, "early_exit.draft"),
        ({"draft": {"layer": 2, "threshold": 0.5}}, "early_exit.draft"),
        ({"draft": {"length": 2}}, "early_exit.draft.layer"),
        ({"draft": {"layer": 2, "length": 0}}, "early_exit.draft.length"),
        ({"draft": {"layer": 2, "measure": "agreement"}}, "early_exit.draft.measure"),
        ({"threshold": 0.5, "rule": "own"}, "early_exit.rule"),
        ([], "early_exit"),
        ("full", "early_exit"),
    ],
)
def test_early_exit_that_makes_no_sense_is_refused_by_name(asked: Any, param: str) -> None:
    """Fault 28: thresholds of -1 and 2 among them."""
    response = complete(app_of(), early_exit=asked)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("fields", [{"temperature": 0.5}, {"min_tokens": 1}], ids=str)
def test_a_draft_is_for_greedy_calls(fields: dict[str, Any]) -> None:
    response = complete(app_of(), early_exit={"draft": {"layer": 2}}, **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == "early_exit.draft"


def test_policy_certified_without_a_certificate_says_so() -> None:
    engine = FakeEngine(info=info_with(tolerances={}, measure=None))
    error = error_of(complete(app_of(engine), early_exit={"policy": "certified"}))
    assert error["code"] == "not_calibrated" and "policy full" in error["message"]


NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    "echo": ([False, None], [True, 0, "false"]),
    "logprobs": ([None], [0, 5, False]),
    "presence_penalty": ([0, 0.0, None], [0.1, -2, False]),
    "frequency_penalty": ([0, 0.0, None], [1, "0"]),
    "logit_bias": ([{}, None], [{"50256": -100}, []]),
    "suffix": ([None], ["", "x"]),
    "repetition_penalty": ([1, 1.0, None], [1.1, 0, True]),  # of vLLM's, whose benchmark client sends it
    "top_k": ([-1, 0, None], [1, 50]),
    "min_p": ([0, 0.0, None], [0.1]),
    "best_of": ([1, None], [2, 0, 10**6, True]),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_openai_fields_that_are_not_offered_pass_only_with_their_neutral_value(name: str) -> None:
    """Fault 39: real clients send them unasked; anything that would ask for something is refused by name."""
    passing, refused = NEUTRAL[name]
    app = app_of()
    for value in passing:
        assert complete(app, **{name: value}).status_code == 200, value
    for value in refused:
        response = complete(app, **{name: value})
        assert response.status_code == 400, value
        error = error_of(response)
        assert error["param"] == name and name in error["message"]


def test_best_of_may_repeat_n() -> None:
    assert complete(app_of(), n=2, best_of=2, temperature=1).status_code == 200
    assert complete(app_of(), n=2, best_of=1).status_code == 400


def test_user_is_ignored_and_stream_options_need_a_stream() -> None:
    assert complete(app_of(), user="somebody").status_code == 200
    assert complete(app_of(), stream=False, stream_options=None).status_code == 200
    error = error_of(complete(app_of(), stream_options={"include_usage": True}))
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("name", ["foo", "messages", "guided_json", "skip_special_tokens"])
def test_unknown_fields_are_refused_by_name(name: str) -> None:
    """Fault 39."""
    error = error_of(complete(app_of(), **{name: 1}))
    assert (error["param"], error["code"]) == (name, "unknown_field") and name in error["message"]


HUGE = int("9" * 50)
WRONG: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 65, 10**9, HUGE, True, "5", 5.0, [5])],
    *[("min_tokens", value) for value in (-1, 65, HUGE, 1.5)],
    *[("temperature", value) for value in (-1, 2.1, HUGE, True, "0")],
    *[("top_p", value) for value in (0, 2, -0.1, HUGE, False)],
    *[("n", value) for value in (0, -1, 17, 10**6, HUGE, True, "2", 2.0)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, HUGE, 1.0, True, "1")],
    *[("stop", value) for value in (["x"] * 17, ["x"] * 100_000, [""], "", ["x" * 257], [1], [None], 5, {})],
    *[("stream", value) for value in (1, "true", 0.0)],
    *[("ignore_eos", value) for value in (1, "no")],
    *[("truncate", value) for value in (0, "yes")],
    *[("user", value) for value in (1, ["a"])],
    *[("model", value) for value in (1, None, ["demo"])],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:16])
def test_values_out_of_range_or_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    """Fault 28; and integers are neither booleans nor strings nor floats."""
    engine = FakeEngine()
    response = complete(app_of(engine), **{name: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == name
    assert engine.submitted == []
    assert str(HUGE) not in error["message"]


def test_refusals_are_quick() -> None:
    """Fault 28: within 50 ms of this process' own time, at the sizes that cost others most."""
    import time

    from serve.http.asked import read_request
    from serve.http.errors import ApiError
    from serve.http.strict_json import strict_json

    bodies = [
        b'{"model": "demo", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "prompt": "a", "n": ' + b"9" * 50 + b"}",
        json.dumps({"model": "demo", "prompt": "a", "stop": ["x"] * 100_000}).encode(),
        b'{"model": "demo", "prompt": "a", "temperature": 1e400}',
    ]
    for body in bodies:
        spent = []
        for _ in range(3):
            begun = time.thread_time()
            with pytest.raises(ApiError):
                read_request(strict_json(body))
            spent.append(time.thread_time() - begun)
        assert min(spent) < 0.05


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert error_of(complete(app_of(), max_tokens=3, min_tokens=4))["param"] == "min_tokens"


def test_limits_of_the_server_are_settings() -> None:
    from calm.serve_config import ServeLimits

    app = app_of(limits=ServeLimits(max_prompts_per_call=2, max_n=3, max_stops=1))
    assert complete(app, prompt=["a", "b"], n=3, stop="x").status_code == 200
    for fields, param in (({"prompt": ["a"] * 3}, "prompt"), ({"n": 4}, "n"), ({"stop": ["x", "y"]}, "stop")):
        assert error_of(complete(app, **fields))["param"] == param


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_what_is_missing_is_named(missing: str) -> None:
    body = {name: value for name, value in {"model": NAME, "prompt": "a"}.items() if name != missing}
    response = ask(app_of(), "POST", "/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == missing


def refusing(error: Exception) -> FakeEngine:
    def script(source: Source, options: RequestOptions) -> Script:
        return Script(refused=error) if source == "bad" else Script((("x", (5,), (2,)),))

    return FakeEngine(script)


def test_a_refusal_of_the_engine_cancels_the_other_prompts() -> None:
    from calm.errors import CalibrationError, ConfigError, DataError
    from serve.errors import QueueFull

    for error, status, param in (
        (DataError("it has 9 tokens"), 400, "prompt[1]"),
        (ConfigError("no"), 400, None),
        (CalibrationError("no certificate"), 400, "early_exit"),
        (QueueFull("full"), 429, None),
        (RuntimeError("secret"), 500, None),
    ):
        engine = refusing(error)
        engine.held = True
        response = complete(app_of(engine), prompt=["good", "bad", "good"])
        assert response.status_code == status
        assert error_of(response)["param"] == param
        assert "secret" not in response.text
        assert (response.headers.get("retry-after") is not None) == (status == 429)
        assert [stream.cancelled for stream in engine.submitted] == [True, False, True]


def test_a_request_that_fails_in_the_engine_is_a_500_without_the_reason() -> None:
    engine = FakeEngine(lambda source, options: Script((("x", (5,), (2,)),), failed="nan in 'my secret prompt'"))
    response = complete(app_of(engine), prompt="my secret prompt")
    assert response.status_code == 500
    error = error_of(response)
    assert error["code"] == "engine_failed" and "secret" not in response.text and "nan" not in response.text


@pytest.mark.parametrize("ignores", [False, True])
def test_an_answer_that_takes_too_long_is_a_504_that_says_what_to_do(ignores: bool) -> None:
    """Whether the engine gives it up at its deadline or says nothing any more."""
    engine = FakeEngine(ignores_deadlines=ignores)
    engine.held = True
    response = complete(app_of(engine, request_timeout_s=0.05))
    assert response.status_code == 504
    error = error_of(response)
    assert error["code"] == "request_timeout" and "0.05 s" in error["message"] and "fewer tokens" in error["message"]


@pytest.mark.parametrize(
    ("state", "code"),
    [("loading", "not_ready"), ("hung", "not_ready"), ("dead", "not_ready"), ("draining", "draining")],
)
def test_an_engine_that_takes_nothing_is_a_503_with_retry_after(state: str, code: str) -> None:
    """Fault 35, the server's part of it."""
    engine = FakeEngine()
    engine.state = state
    app = app_of(engine)
    for response in (complete(app), ask(app, "GET", "/readyz")):
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert error_of(response)["code"] == code
    assert ask(app, "GET", "/healthz").status_code == 200
