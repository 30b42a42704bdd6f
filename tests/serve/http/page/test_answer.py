"""What goes over the wire when a text is sent, and what is shown of the answer."""

import re

import pytest

from .looking import STORY, OpenPage, expect, facts, finished, focused, histogram, send, status, tokens
from .scripted_server import DONE, FOLDER, Json, Script, ScriptedServer, Wait, chunk, ending, event, said, spoken


def test_an_answer_streams_in_and_each_token_is_shaded_by_its_layer(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    server.answer = lambda request: [said("the", 2), Wait("rest"), said(" quick", 5), said("", 1), *ending([2, 5, 1])]
    page = open_page()
    send(page, "some text")
    expect(page.get_by_role("option")).to_have_count(1)
    expect(status(page)).to_have_text("running")
    assert facts(page)["tokens"] == "1" and facts(page)["all"] == "–"
    server.open("rest")
    finished(page)
    assert tokens(page) == [("the", "2"), ("quick", "5"), ("", "1")]
    assert page.locator(".answer").text_content() == "the quick"
    shades = page.get_by_role("option").evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
    assert len(set(shades)) == 3
    shown = facts(page)
    assert all(re.fullmatch(r"\d+ ms", shown.pop(name).replace(",", "")) for name in ("first", "all"))
    assert shown == {"tokens": "3", "mean": "2.67 of 8", "skipped": "66.7 %", "certified": "yes"}
    assert histogram(page) == {layer: int(layer in (1, 2, 5)) for layer in range(1, 9)}
    assert server.requests == [
        {
            "model": "tiny",
            "prompt": "some text",
            "stream": True,
            "stream_options": {"include_usage": True},
            "early_exit": {"tolerance": 0.02, "consistency": "risk", "layers": True},
        }
    ]


@pytest.mark.slow
def test_a_chunk_of_several_tokens_or_of_none(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [
        said("one two  three", 4, 2, 1),  # a word a token: each its own shade
        said(" unbelievable news", 3, 6, 1),  # which is whose cannot be known
        said("", 7),  # a piece whose text is not final yet
        said(" é", 5),
        said("\n"),  # text without a token of its own
        said("", 2),
        *ending([4, 2, 1, 3, 6, 1, 7, 5, 2]),
    ]
    page = open_page()
    send(page)
    finished(page)
    assert tokens(page) == [
        ("one", "4"), ("two", "2"), ("three", "1"), ("unbelievable news", "3 6 1"), ("é", "7 5"), ("\n", ""), ("", "2"),
    ]  # fmt: skip
    assert page.locator(".answer").text_content() == "one two  three unbelievable news é\n"
    titles = page.get_by_role("option").evaluate_all("all => all.map((each) => each.title)")
    assert titles[2:] == [
        "layer 1 of 8", "layers 3, 6, 1 of 8", "layers 7, 5 of 8", "layer not told", "layer 2 of 8",
    ]  # fmt: skip
    assert page.get_by_role("option").nth(3).evaluate("each => getComputedStyle(each).backgroundImage") != "none"
    assert histogram(page) == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 0}
    assert facts(page)["tokens"] == "9"
    expect(page.get_by_role("option", name="end, layer 2 of 8")).to_be_visible()


@pytest.mark.slow
def test_the_server_s_own_counts_are_shown_and_what_is_not_certified_says_so(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    last = chunk(" more", [3], "length", certified=False, tokens=7, mean_exit_layer=2.5, layers_skipped=0.6875)
    server.answer = lambda request: [said("so", 2), event(last), DONE]
    page = open_page()
    send(page)
    finished(page)
    assert {**facts(page), "first": "", "all": ""} == {
        "tokens": "7", "mean": "2.50 of 8", "skipped": "68.8 %", "certified": "no", "first": "", "all": "",
    }  # fmt: skip
    assert tokens(page) == [("so", "2"), ("more", "3")]


@pytest.mark.slow
def test_an_answer_without_tokens(server: ScriptedServer, open_page: OpenPage) -> None:
    last = chunk("", [], "stop", certified=True, tokens=0, mean_exit_layer=None, layers_skipped=None)
    server.answer = lambda request: [event(last), DONE]
    page = open_page()
    send(page)
    finished(page)
    assert (facts(page)["tokens"], facts(page)["mean"], facts(page)["skipped"]) == ("0", "–", "–")


@pytest.mark.slow
def test_pointing_and_focus_tell_the_layer(open_page: OpenPage) -> None:
    page = open_page()
    send(page)
    finished(page)
    readout, pointed = page.locator(".readout"), page.locator("tr.pointed th")
    expect(readout).to_contain_text("arrow keys")
    page.get_by_role("option", name="quick").hover()
    expect(readout).to_have_text("quick, layer 5 of 8")
    expect(pointed).to_have_text(["5"])
    page.mouse.move(0, 0)
    expect(readout).to_contain_text("arrow keys")
    expect(pointed).to_have_count(0)
    page.locator("#numbers").focus()
    for _ in range(2):  # Send is between them; Stop has nothing to stop
        page.keyboard.press("Tab")
    expect(readout).to_have_text("the, layer 2 of 8")
    for key, said_then in (
        ("ArrowRight", "quick, layer 5 of 8"),
        ("ArrowDown", "fox, layer 1 of 8"),
        ("End", "end, layer 1 of 8"),
        ("ArrowRight", "end, layer 1 of 8"),
        ("ArrowLeft", "fox, layer 1 of 8"),
        ("Home", "the, layer 2 of 8"),
        ("ArrowUp", "the, layer 2 of 8"),
    ):
        page.keyboard.press(key)
        expect(readout).to_have_text(said_then)
        expect(page.locator("[role=option][aria-selected=true]")).to_have_count(1)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")  # the list is one stop, and keeps its place
    expect(readout).to_have_text("quick, layer 5 of 8")


@pytest.mark.slow
def test_layer_numbers_can_be_shown_beside_the_tokens(open_page: OpenPage) -> None:
    page = open_page()
    send(page)
    finished(page)
    after = "all => all.map((each) => getComputedStyle(each, '::after').content)"
    assert set(page.get_by_role("option").evaluate_all(after)) == {"none"}
    page.get_by_label("Show layer numbers").check()
    shown = page.get_by_role("option").evaluate_all(after)
    assert [re.findall(r"\d", content) for content in shown] == [["2"], ["5"], ["1"], ["1"]]
    assert page.locator(".answer").text_content() == "the quick fox"


@pytest.mark.slow
def test_side_by_side_both_answers_stream_and_finish_on_their_own(server: ScriptedServer, open_page: OpenPage) -> None:
    def answer(request: Json) -> Script:
        if request["early_exit"].get("policy") == "full":
            return [said("deep", 8), Wait("full"), *ending([8])]
        return [Wait("early"), *spoken(STORY, certified=False)]

    server.answer = answer
    page = open_page()
    page.get_by_label("Side by side with full depth").check()
    send(page, "both")
    expect(page.locator(".status")).to_have_text(["running", "waiting"])
    server.open("early")
    expect(page.locator(".status")).to_have_text(["running", "finished"])
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    server.open("full")
    finished(page, 2)
    expect(page.locator("h2")).to_have_text(["Full depth", "Early exit, risk tolerance 0.02"])
    full, early = facts(page, 0), facts(page, 1)
    assert [full[name] for name in ("tokens", "mean", "skipped", "certified")] == ["1", "8.00 of 8", "0.0 %", "yes"]
    assert [early[name] for name in ("tokens", "mean", "skipped", "certified")] == ["4", "2.25 of 8", "71.9 %", "no"]
    assert all(each[name].endswith(" ms") for each in (full, early) for name in ("first", "all"))
    assert {request["prompt"] for request in server.requests} == {"both"}
    asked = sorted((request["early_exit"] for request in server.requests), key=len)
    assert asked == [{"policy": "full", "layers": True}, {"tolerance": 0.02, "consistency": "risk", "layers": True}]
    expect(page.get_by_text("slow each other down")).to_be_visible()


@pytest.mark.slow
def test_it_says_that_layers_skipped_is_no_speed_up(open_page: OpenPage) -> None:
    expect(open_page().get_by_text("Layers skipped is not a speed-up.")).to_be_visible()


@pytest.mark.slow
def test_an_example_can_be_picked(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page()
    buttons = page.get_by_role("group", name="Examples").get_by_role("button")
    texts = []
    for button in buttons.all():
        button.click()
        texts.append(page.get_by_label("Text", exact=True).input_value())
        assert focused(page) == "prompt"
    assert len(set(texts)) == 3 and all(len(text) > 50 for text in texts)
    page.keyboard.press("Control+Enter")
    finished(page)
    assert server.requests[0]["prompt"] == texts[-1]


@pytest.mark.slow
def test_the_page_works_in_a_folder(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page(folder=FOLDER)
    send(page)
    finished(page)
    assert server.requests and {path for path in server.asked if not path.startswith(FOLDER)} == set()
