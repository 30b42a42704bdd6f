"""What the tests of the page do to it and read from it. Where the browser is missing they are skipped, file by file."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed; the tests of the page need it")
if shutil.which("chromium") is None:
    pytest.skip("chromium is not installed; the tests of the page need it", allow_module_level=True)

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright  # noqa: E402

__all__ = ["Browser", "Locator", "OpenPage", "Page", "expect"]

OpenPage = Callable[..., Page]
PATIENCE_S = 60.0
STORY = [("the", 2), (" quick", 5), (" fox", 1), ("", 1)]


@contextmanager
def chromium() -> Iterator[Browser]:
    """One that waits for what must come as long as a busy machine may take."""
    with sync_playwright() as playwright:
        expect.set_options(timeout=1000 * PATIENCE_S)
        launched = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield launched
        launched.close()


def send(page: Page, text: str = "a text") -> None:
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def status(page: Page, which: int = 0) -> Locator:
    return page.locator(".status").nth(which)


def finished(page: Page, panes: int = 1) -> None:
    expect(page.locator(".status")).to_have_text(["finished"] * panes)


def tokens(page: Page) -> list[tuple[str, str]]:
    """Text and layers of each token."""
    found = page.get_by_role("option").evaluate_all("all => all.map((each) => [each.textContent, each.dataset.layers])")
    return [(text, layers) for text, layers in found]


def facts(page: Page, which: int = 0) -> dict[str, str]:
    """What was measured of an answer, by name."""
    found = page.locator(".pane").nth(which).locator("[data-fact]")
    return dict(found.evaluate_all("all => all.map((each) => [each.dataset.fact, each.textContent])"))


def histogram(page: Page, which: int = 0) -> dict[int, int]:
    """Tokens by exit layer."""
    rows = page.locator(".pane").nth(which).locator("tbody tr")
    found = rows.evaluate_all("all => all.map((row) => [...row.cells].map((cell) => cell.textContent))")
    return {int(layer): int(count) for layer, count in found}


def focused(page: Page) -> str:
    """The id of what has the focus, else its text."""
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
