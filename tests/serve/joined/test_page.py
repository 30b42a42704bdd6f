"""The page, in a real browser, with what a real engine says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from calm import save
from calm.calibration.identity import ModelIdentity
from calm.policies import Full
from serve.engine import Engine
from serve.options import EngineOptions
from serve.requests import Answer
from tests.scripted import early_exit, examples, random_t5

from ..http.page.looking import PATIENCE_S, Browser, Page, chromium, expect, facts, finished, histogram, send, tokens
from ..http.running import running
from ..test_certified import artifact
from .serving import START_S, VOCABULARY, alone, engine_of, until

LENGTH = 24
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose certificates speak of it: tolerances 0.01 (full depth), 0.05 and 0.1."""
    model = early_exit(random_t5(vocabulary=VOCABULARY), length=LENGTH)
    made = save(model, tmp_path_factory.mktemp("page") / "model")
    identity = ModelIdentity.of(model, made, dtype="float32")
    artifact(identity=identity).save(made / "calibration")
    return made


@pytest.fixture(scope="module")
def engine(own: Path) -> Engine:
    """The same in this process."""
    return Engine(own, max_batch=4)


@pytest.fixture(scope="module")
def url(own: Path) -> Iterator[str]:
    with running(engine_of(own, EngineOptions(max_batch=4)), wait=False, request_timeout_s=600.0) as server:
        until(lambda: server.engine.state == "ready" or server.error, START_S)
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    errors: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator("#about")).to_contain_text("4 decoder layers")
    yield page
    page.close()
    assert errors == []


def interesting(engine: Engine) -> tuple[str, Answer, Answer]:
    """A text whose tokens leave at several layers at the certified threshold; that answer, and full depth's."""
    for row in examples(VOCABULARY, 200, longest=7):
        early = alone(engine, row.source, tolerance=TOLERANCE)
        if len(set(early.emission_layers)) > 1 and len(early.tokens) > 4:
            return row.source, early, alone(engine, row.source, policy=Full())
    raise AssertionError("all texts leave at one layer")


def choose(page: Page, tolerance: float) -> None:
    """By the keyboard, as far as it takes."""
    slider = page.locator("#tolerance")
    slider.press("Home")
    for _ in range(int(slider.get_attribute("max") or 0)):
        if f"{tolerance:g}" in (page.locator("#tolerance-says").text_content() or ""):
            return
        slider.press("ArrowRight")
    expect(page.locator("#tolerance-says")).to_contain_text(f"{tolerance:g}")


def shown(answer: Answer) -> dict[int, int]:
    return {layer: answer.emission_layers.count(layer) for layer in range(1, 5)}


@pytest.mark.slow
def test_an_answer_and_full_depth_beside_it_are_the_engine_s(page: Page, engine: Engine) -> None:
    source, early, full = interesting(engine)
    choose(page, TOLERANCE)
    page.locator("#beside").check()
    send(page, source)
    finished(page, panes=2)
    for pane, answer in enumerate((full, early)):
        assert page.locator(".answer").nth(pane).text_content() == answer.text
        told = facts(page, pane)
        mean = sum(answer.emission_layers) / len(answer.emission_layers)
        assert (told["tokens"], told["mean"]) == (str(len(answer.tokens)), f"{mean:.2f} of 4")
        assert told["certified"] == ("yes" if answer.certified else "no")
        assert histogram(page, pane) == shown(answer)
    assert early.certified and set(full.emission_layers) == {4}


@pytest.mark.slow
def test_a_browser_sends_the_key_as_a_password(browser: Browser, own: Path) -> None:
    """The page and all that it asks for; a browser that has no key gets nothing."""
    with running(engine_of(own, EngineOptions(max_batch=4)), "k3y", wait=False) as server:
        until(lambda: server.engine.state == "ready" or server.error, START_S)
        stranger = browser.new_page(http_credentials={"username": "calm", "password": "another"})
        refused = stranger.goto(server.url)
        assert refused is not None and refused.status == 401 and stranger.locator("#ask").count() == 0
        stranger.close()
        page = browser.new_page(http_credentials={"username": "calm", "password": "k3y"})
        page.goto(server.url)
        expect(page.locator("#about")).to_contain_text("4 decoder layers")
        send(page, "w5 w6")
        finished(page)
        page.close()


@pytest.mark.slow
def test_the_slider_stands_at_what_is_certified_and_tokens_carry_their_layers(page: Page, engine: Engine) -> None:
    source, early, _ = interesting(engine)
    choose(page, TOLERANCE)
    send(page, source)
    finished(page)
    found = [int(layer) for _, layers in tokens(page) for layer in layers.split()]
    assert found == list(early.emission_layers)
