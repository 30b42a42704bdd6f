"""Text is text, wherever it comes from; the policy of the page's contents is never broken."""

import pytest

from .conftest import WATCH
from .looking import Browser, OpenPage, expect, finished, send
from .scripted_server import Refusal, ScriptedServer, ending, model, said

pytestmark = pytest.mark.slow

HOSTILE = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>&lt;b&gt; ${1} \"'"


def test_text_is_text_wherever_it_comes_from(server: ScriptedServer, open_page: OpenPage) -> None:
    server.models = [model(f"m{HOSTILE}", measure=HOSTILE)]
    server.answer = lambda request: [said(f"the {HOSTILE}", 2), *ending([2])]
    page = open_page()
    expect(page.locator("#about")).to_contain_text(HOSTILE)
    send(page, HOSTILE)
    finished(page)
    assert page.locator(".answer").text_content() == f"the {HOSTILE}"
    page.locator(".token").focus()
    expect(page.locator(".readout")).to_contain_text(HOSTILE)
    expect(page.get_by_role("status")).to_contain_text(HOSTILE)
    assert server.requests[0]["prompt"] == HOSTILE
    server.answer = lambda request: Refusal(400, HOSTILE)
    send(page, HOSTILE)
    expect(page.get_by_role("alert")).to_have_text(HOSTILE)
    assert page.evaluate("window.hit") is None
    assert page.locator("body :is(script, img, b)").count() == 0


def test_a_breach_of_the_policy_would_be_seen(browser: Browser, server: ScriptedServer) -> None:
    """The check that every other test ends with can fail."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(server.url)
    page.evaluate("document.body.setAttribute('style', 'color: red')")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.evaluate("window.broken.length") == 1
    context.close()
