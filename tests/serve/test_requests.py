"""What a request may ask for, how its answer ends, and what is refused."""

import time
from typing import Any

import pytest

from calm.config import BatchRule, Measure
from calm.errors import CalmError, ConfigError, DataError
from calm.kv_budget import ErrorTable
from calm.policies import Budgeted, Confident, Full, Oracle, Replay, Static
from calm.thresholds import ThresholdSchedule
from serve.engine import Engine
from serve.options import EngineOptions, RequestOptions
from serve.requests import Answer, Reason, Status

from .models import texts, tiny_served
from .stories import LENGTH, ONE, TEN, story_engine


def answer(source: str = "w3", **options: Any) -> Answer:
    return story_engine().generate([source], **options)[0]


def test_a_plain_request_ends_at_eos() -> None:
    found = answer()
    assert (found.tokens, found.text) == (ONE, "one two three four")
    assert (found.status, found.reason, found.error) == (Status.finished, Reason.eos, "")


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_max_tokens(limit: int) -> None:
    found = answer(max_tokens=limit)
    assert found.tokens == ONE[:limit]
    assert found.reason is Reason.length
    assert answer(max_tokens=5).reason is Reason.eos


def test_min_tokens_puts_eos_off() -> None:
    assert answer("w4").tokens == TEN
    assert answer("w4", min_tokens=3).tokens == TEN
    longer = answer("w4", min_tokens=5)
    assert longer.tokens[:2] == TEN[:2]
    assert len(longer.tokens) >= 5 and 1 not in longer.tokens[:4]


def test_ignore_eos_goes_on_to_the_limit() -> None:
    found = answer("w4", ignore_eos=True)
    assert found.tokens[:3] == TEN and len(found.tokens) == LENGTH
    assert found.reason is Reason.length
    assert len(answer("w4", ignore_eos=True, max_tokens=4).tokens) == 4


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("three",), "one two ", ONE[:3]),  # it crosses the border of two tokens
        (("two",), "one ", ONE[:2]),
        (("one",), "", ONE[:1]),
        (("four", "two"), "one ", ONE[:2]),
        ((" ",), "one", ONE[:1]),
        (("o t", "ne"), "o", ONE[:1]),
        (("five",), "one two three four", ONE),
    ],
)
def test_stop_strings_cut_the_text(stop: tuple[str, ...], text: str, tokens: tuple[int, ...]) -> None:
    found = answer(stop=stop)
    assert (found.text, found.tokens) == (text, tokens)
    assert found.reason is (Reason.stop if tokens != ONE else Reason.eos)
    assert "".join(story_engine().stream("w3", stop=stop)) == text


def test_stop_ids_are_kept() -> None:
    found = answer(stop_ids={7})
    assert (found.tokens, found.text, found.reason) == (ONE[:3], "one two three", Reason.stop)
    assert answer(stop_ids=[9]).tokens == ONE


def test_stops_do_not_count_before_min_tokens() -> None:
    assert answer(stop=("one", "two", " four"), min_tokens=3).text == "one two three"
    assert answer(stop=("three",), min_tokens=3).text == "one two "  # it ends at the third token
    assert answer(stop=("two",), min_tokens=4).text == "one two three four"
    assert answer(stop_ids={5, 7}, min_tokens=2).tokens == ONE[:3]
    assert "".join(story_engine().stream("w3", stop=("two", " four"), min_tokens=3)) == "one two three"


def test_streams_are_whole_beside_each_other() -> None:
    engine = story_engine()
    first, second = engine.stream("w3"), engine.stream("w4")
    pieces: tuple[list[str], list[str]] = [], []
    pieces[0].append(next(first))
    pieces[1].append(next(second))
    pieces[0].extend(first)  # to its end, the other goes on beside it
    pieces[1].extend(second)
    assert "".join(pieces[0]) == "one two three four" and len(pieces[0]) > 2
    assert "".join(pieces[1]) == "ten eleven"


def test_an_engine_goes_on_after_a_stream_that_nobody_reads() -> None:
    engine = story_engine()
    other = engine.add_request("w4", name="other")
    stream = engine.stream("w3")
    next(stream)
    stream.close()
    assert len(engine.slots.taken) == engine.num_running == 1
    found = []
    while engine.has_work:
        found += engine.step().answers
    assert [(each.id, each.tokens) for each in found] == [(other, TEN)]
    assert engine.generate(["w3"])[0].tokens == ONE


def test_a_stream_tells_of_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = story_engine(runner="eager")

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(engine.machine.runner, "layer", broken)
    with pytest.raises(CalmError, match="no such layer"):
        list(engine.stream("w3"))


def test_generate_keeps_the_order_and_takes_more_than_the_queue_holds() -> None:
    engine = story_engine(max_waiting=2, max_batch=2)
    found = engine.generate(["w3", "w4"] * 5)
    assert [each.tokens for each in found] == [ONE, TEN] * 5
    assert engine.generate([]) == []


def test_generate_refuses_a_bad_source_and_leaves_the_engine_idle() -> None:
    engine = story_engine()
    with pytest.raises(DataError, match="lone surrogate"):
        engine.generate(["w3", "w4", "w3 \ud800", "w4"])
    assert not engine.has_work and not engine.slots.taken
    assert engine.generate(["w4"])[0].tokens == TEN
    engine.add_request("w3")
    with pytest.raises(ConfigError, match="generate needs an idle engine"):
        engine.generate(["w4"])


def test_abort_wherever_a_request_is() -> None:
    engine = story_engine(max_batch=1)
    names = [engine.add_request("w3", name=name) for name in ("running", "waiting", "last")]
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    assert engine.abort("running") and engine.abort("waiting")
    assert not engine.abort("running") and not engine.abort("nobody")
    found: dict[str, Answer] = {}
    while engine.has_work:
        found.update({each.id: each for each in engine.step().answers})
    assert {name: found[name].status.value for name in names} == {
        "running": "cancelled",
        "waiting": "cancelled",
        "last": "finished",
    }
    assert found["running"].tokens == ONE[:1] and found["waiting"].tokens == ()
    assert not found["running"].certified
    assert found["last"].tokens == ONE


def test_request_ids_are_free_again_once_answered() -> None:
    engine = story_engine()
    assert engine.add_request("w3", name="request-1") == "request-1"
    assert len({engine.add_request("w3"), engine.add_request("w3"), "request-1"}) == 3
    with pytest.raises(ConfigError, match="'request-1' is in use"):
        engine.add_request("w3", name="request-1")
    while engine.has_work:
        engine.step()
    engine.add_request("w3", name="request-1")


HOSTILE: list[dict[str, Any]] = [
    *({"max_tokens": value} for value in (0, -1, 10**9, 10**50, 10**5000, 2.0, "5", True, float("nan"), LENGTH + 1)),
    *({"min_tokens": value} for value in (-1, 10**9, 10**5000, LENGTH + 1, "1", None, 1.0)),
    {"min_tokens": 3, "max_tokens": 2},
    *({"temperature": value} for value in (-1, float("nan"), float("inf"), -0.1, "hot", None, 10**5000)),
    *({"top_p": value} for value in (0, -1, 2, float("nan"), "1")),
    *({"threshold": value} for value in (-1, 2, float("nan"), "0.5", True)),
    *({"tolerance": value} for value in (-1, float("nan"), "0.05", [0.1])),
    *({"seed": value} for value in (1.5, "1", 10**5000, True)),
    *({"stop": value} for value in ("abc", ("",), ("a" * 10_000,), ("a",) * 500_000, (5,), 7, None)),
    *({"stop_ids": value} for value in ({-1}, {20}, {10**5000}, {"a"}, "abc", range(10_000), 5)),
    *({"ignore_eos": value} for value in (1, "no", None)),
    *({"policy": value} for value in ("full", 3, Oracle(), Static(0), Static(7), Replay({"x": (9,)}))),
    {"policy": Confident(Measure.softmax, ThresholdSchedule((0.5, 0.5)))},
    {"policy": Full(), "threshold": 0.5},
    {"threshold": 0.5, "tolerance": 0.5},
    {"threshold": 0.5, "consistency": "no"},
]


def test_hostile_values_are_refused_in_one_line_and_at_once() -> None:
    engine = story_engine()
    began = time.process_time()
    for values in HOSTILE:
        with pytest.raises((ConfigError, DataError)) as caught:
            engine.add_request("w3", **values, name="x")
        said = str(caught.value)
        assert "\n" not in said and len(said) < 300, said
    assert time.process_time() - began < 0.05 * len(HOSTILE)
    assert not engine.has_work
    assert engine.generate(["w3"])[0].tokens == ONE


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("w3 \ud800", "lone surrogate"),
        ([], "a source of ids is empty"),
        ([5, 20], "id number 1 is none of the vocabulary: ids are whole numbers from 0 to 19"),
        ([-1], "none of the vocabulary"),
        ([10**5000], "none of the vocabulary"),
        ([True], "none of the vocabulary"),
        ([3.0], "none of the vocabulary"),
        (["w3"], "none of the vocabulary"),
        ([3] * 17, "has 17 ids, the model takes 16"),
        (b"w3", "a text or a sequence of ids, got bytes"),
        (None, "a text or a sequence of ids, got NoneType"),
        (5, "a text or a sequence of ids, got int"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(source: Any, message: str) -> None:
    engine = story_engine()
    with pytest.raises(DataError, match=message):
        engine.add_request(source)
    assert not engine.has_work


def test_a_long_text_is_cut_or_refused_with_both_numbers() -> None:
    engine = story_engine()
    fits, longer = " ".join(["w3"] * 15), " ".join(["w3"] * 16)  # and EOS: 16 ids, 17 ids
    cut = engine.generate([longer, fits])
    assert cut[0].tokens == cut[1].tokens
    assert engine.generate([fits], truncate=False)[0].tokens == cut[1].tokens
    with pytest.raises(DataError, match="has 17 tokens, the model takes 16"):
        engine.add_request(longer, truncate=False)
    assert not engine.has_work


def test_odd_texts_are_answered() -> None:
    engine = Engine(tiny_served(), max_batch=2, poison=True)
    odd = ["", "\0", "w3 \0 w4", "\n\t", "w5 </s> w6", "<pad>", "<extra_id_0>", "é\u0301🙂", "w7 " * 500]
    found = engine.generate(odd)
    assert all(each.status is Status.finished for each in found)
    ids = engine.model.to_ids
    assert ids("") == [1]
    assert ids("w5 </s> w6")[0] == 5 and 1 not in ids("w5 </s> w6")[:-1]  # no control token is made of text
    assert len(ids("w7 " * 500)) == 16


def test_ids_and_text_are_the_same_source() -> None:
    engine = Engine(tiny_served(), max_batch=2, poison=True)
    text = texts()[0]
    by_text, by_ids = engine.generate([text, engine.model.to_ids(text)])
    assert by_text.tokens == by_ids.tokens


@pytest.mark.parametrize(
    "values",
    [
        {"max_batch": 0},
        {"max_batch": 2.5},
        {"quantile": 0.0},
        {"quantile": float("nan")},
        {"rule": "fastest"},
        {"head": "small"},
        {"buckets": (4, 2)},
        {"buckets": (1, 2), "max_batch": 4},
        {"buckets": (0, 4), "max_batch": 4},
        {"prefill_rows": 0},
        {"cross_cache_rows": -1},
    ],
)
def test_engine_options_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineOptions(**values)


def test_options_take_the_plain_names_of_choices() -> None:
    assert EngineOptions(rule="lockstep").rule is BatchRule.lockstep  # type: ignore[arg-type]
    assert RequestOptions(stop=["a"], stop_ids=[3]).stop == ("a",)  # type: ignore[arg-type]
    assert EngineOptions(max_batch=6).ladder == (1, 2, 4, 6)
    assert EngineOptions(max_batch=1).ladder == (1,)
    assert EngineOptions(max_batch=6, buckets=(3, 6)).ladder == (3, 6)


def test_a_budget_of_errors_is_refused_and_the_engine_goes_on() -> None:
    engine = story_engine()
    exits = Confident(Measure.softmax, ThresholdSchedule(0.5))
    with pytest.raises(ConfigError, match="'budgeted' is decoded by calm alone, not by the engine"):
        engine.generate(["w3"], policy=Budgeted(exits, 1.0, ErrorTable.flat(4)))
    assert engine.generate(["w3"])[0].tokens == ONE
