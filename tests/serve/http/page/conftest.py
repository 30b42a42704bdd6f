"""One browser for all tests of the page, a server each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from .scripted_server import ScriptedServer, spoken

if TYPE_CHECKING:
    from .looking import Browser, OpenPage, Page

WATCH = """
window.broken = [];
addEventListener('securitypolicyviolation', (e) => broken.push(`${e.violatedDirective} ${e.blockedURI}`));
"""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    from .looking import chromium

    with chromium() as launched:
        yield launched


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    from .looking import STORY

    with ScriptedServer() as scripted:
        scripted.answer = lambda request: spoken(STORY)
        yield scripted


@pytest.fixture
def open_page(browser: Browser, server: ScriptedServer) -> Iterator[OpenPage]:
    """``open_page(viewport=..., color_scheme=...)``: the page in a fresh context, its model loaded.

    At the end no page has broken the policy of its contents, thrown an error or asked another server.
    """
    from .looking import PATIENCE_S, expect

    pages: list[Page] = []
    errors: list[str] = []
    asked: set[str] = set()

    def opened(folder: str = "", ready: bool = True, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        pages.append(page)
        page.add_init_script(WATCH)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        page.goto(server.url.rstrip("/") + folder + "/")
        if ready:
            expect(page.locator("#about")).to_contain_text("decoder layers")
        return page

    yield opened
    broken = [line for page in pages for line in page.evaluate("window.broken")]
    for page in pages:
        page.context.close()
    assert errors == [] and broken == []
    assert asked == {urlsplit(server.url).netloc}
