"""An answer that is not wanted any more, and a text that is not to be sent."""

import pytest

from .looking import PATIENCE_S, STORY, OpenPage, expect, facts, finished, focused, send, status
from .scripted_server import ScriptedServer, Wait, Watch, ending, said, spoken

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_request_and_keeps_what_came(way: str, server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("the", 2), said(" quick", 5), Watch("left"), *ending([2, 5])]
    page = open_page()
    send(page)
    expect(page.get_by_role("option")).to_have_count(2)
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(status(page)).to_have_text("cancelled")
    assert server.gate("left").wait(PATIENCE_S), "the server's connection is still open"
    assert page.locator(".answer").text_content() == "the quick"
    assert (facts(page)["tokens"], facts(page)["certified"]) == ("2", "–")
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    server.answer = lambda request: spoken(STORY)
    send(page)
    finished(page)


def test_stop_ends_both_answers(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("a", 8), Watch("full" if "policy" in request["early_exit"] else "early")]
    page = open_page()
    page.get_by_label("Side by side").check()
    send(page)
    expect(page.get_by_role("option")).to_have_count(2)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".status")).to_have_text(["cancelled", "cancelled"])
    assert server.gate("full").wait(PATIENCE_S) and server.gate("early").wait(PATIENCE_S)


def test_nothing_is_sent_twice_or_without_a_text(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("the", 2), Wait("rest"), *ending([2])]
    page = open_page()
    send(page, " \n ")
    expect(page.get_by_role("alert")).to_contain_text("nothing to send")
    assert focused(page) == "prompt"
    send(page, "text")
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.get_by_role("option")).to_have_count(1)
    for _ in range(3):
        page.keyboard.press("Control+Enter")
    server.open("rest")
    finished(page)
    assert len(server.requests) == 1
