"""What goes wrong is told in one line, with the way on."""

from email.utils import formatdate
from time import time

import pytest

from .looking import STORY, OpenPage, expect, finished, send, status
from .scripted_server import Cut, Refusal, Script, ScriptedServer, Send, Wait, ending, event, model, said, spoken

pytestmark = pytest.mark.slow

SO, SHOWN = said("so", 2), Wait("shown")


@pytest.mark.parametrize(
    ("script", "line", "kept"),
    [
        (Refusal(400, "prompt: it is\nempty"), "prompt: it is empty", ""),
        (Refusal(429, "the queue is full", {"retry-after": "7"}), "the queue is full (retry after 7 s)", ""),
        (
            Refusal(503, "the engine starts", {"retry-after": formatdate(time() - 60, usegmt=True)}),
            "the engine starts (retry after 0 s)",
            "",
        ),
        (Refusal(503, "the engine starts", {"retry-after": "soon"}), "the engine starts", ""),
        (
            Refusal(502, "", {"content-type": "text/html"}, b"<b>bad gateway</b>"),
            "the server answered with status 502 and no message",
            "",
        ),
        (
            Refusal(200, "", {}, b'{"choices": []}'),
            "the server answered without a stream; is something between it and this page?",
            "",
        ),
        ([SO, SHOWN, event({"error": {"message": "the engine went away"}})], "the engine went away", "so"),
        ([SO, SHOWN, Send(b"data: {oops\n\n")], "the server sent an event that is no part of an answer", "so"),
        ([SO, SHOWN, Send(b"data: null\n\n")], "the server sent an event that is no part of an answer", "so"),
        (
            [SO, SHOWN, Cut()],
            "the connection was lost before the answer was finished; send again for all of it",
            "so",
        ),
        ([SO, SHOWN], "the connection was lost before the answer was finished; send again for all of it", "so"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_error_is_one_clear_line(
    script: Script, line: str, kept: str, server: ScriptedServer, open_page: OpenPage
) -> None:
    server.answer = lambda request: script
    page = open_page()
    send(page)
    if kept:
        expect(page.get_by_role("option")).to_have_text(kept)
        server.open("shown")
    expect(page.get_by_role("alert")).to_have_text(line)
    expect(status(page)).to_have_text("failed")
    assert (page.locator(".answer").text_content() or "") == kept
    expect(page.locator(".facts")).to_be_visible(visible=bool(kept))
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    server.answer = lambda request: spoken(STORY)
    send(page)
    finished(page)
    expect(page.get_by_role("alert")).to_be_empty()


def test_one_of_two_answers_fails(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: (
        [said("a", 8), Wait("rest"), *ending([8])] if "policy" in request["early_exit"] else Refusal(429, "full")
    )
    page = open_page()
    page.get_by_label("Side by side").check()
    send(page)
    expect(page.get_by_role("alert")).to_have_text("full")  # said at once
    server.open("rest")
    expect(page.locator(".status")).to_have_text(["finished", "failed"])


def test_a_server_that_is_gone(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page()
    page.context.set_offline(True)
    send(page)
    expect(page.get_by_role("alert")).to_have_text("the server cannot be reached; see that it runs, then send again")
    page.context.set_offline(False)
    send(page)
    finished(page)


def test_the_browser_keeps_the_key_and_the_page_never_sees_it(server: ScriptedServer, open_page: OpenPage) -> None:
    server.key = "s3cret"
    page = open_page(http_credentials={"username": "anybody", "password": "s3cret"})
    send(page)
    finished(page)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert "s3cret" not in page.content()
    server.key = "another"
    send(page, "again")
    expect(page.get_by_role("alert")).to_have_text(
        "the API key that the browser sends no longer holds; reload the page to give another"
    )
    assert page.get_by_label("Text", exact=True).input_value() == "again"


def test_a_server_that_starts_is_asked_again(server: ScriptedServer, open_page: OpenPage) -> None:
    server.models = [model() | {"ready": False, "early_exit": None}]
    page = open_page(ready=False)
    expect(page.get_by_role("alert")).to_have_text("the server loads its model (retry after 2 s)")
    server.models = [model()]
    expect(page.locator("#about")).to_contain_text("tiny")
    expect(page.get_by_role("alert")).to_be_empty()
    server.models = Refusal(503, "the engine loads its model", {"retry-after": "1"})
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("the engine loads its model (retry after 1 s)")
    server.models = [model()]
    expect(page.locator("#about")).to_contain_text("tiny")
    expect(page.get_by_role("alert")).to_be_empty()
    server.models = Refusal(500, "it failed")
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("it failed")
    server.models = []
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("names no early-exit model")
    server.models = [model()]
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#about")).to_contain_text("tiny")
    expect(page.get_by_role("button", name="Try again")).to_be_hidden()
