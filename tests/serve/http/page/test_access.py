"""By keyboard, by ear, on a phone, without motion."""

import pytest

from .looking import PATIENCE_S, STORY, OpenPage, expect, finished, focused, send
from .scripted_server import Refusal, ScriptedServer, Wait, Watch, ending, model, said, spoken

pytestmark = pytest.mark.slow


def test_all_of_it_by_keyboard_with_the_focus_in_sight(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("the", 2), Wait("rest"), *spoken(STORY)]
    page = open_page()

    def tab(to: str, back: bool = False) -> None:
        page.keyboard.press("Shift+Tab" if back else "Tab")
        assert focused(page) == to
        outline = page.evaluate(
            "() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; }"
        )
        assert outline == ["solid", "3px"], to

    tab("prompt")
    page.keyboard.type("by hand")
    for name in ("Package description", "Restaurant facts", "News"):
        tab(name)
    tab("tolerance")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    tab("")  # the radio that is checked
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("textual")).to_be_checked()
    tab("beside")
    page.keyboard.press("Space")
    tab("numbers")
    tab("send")
    page.keyboard.press("Enter")
    expect(page.locator(".status")).to_have_text(["running", "running"])
    assert focused(page) == "stop"  # the button that was pressed is off, the one of use now has the focus
    server.open("rest")
    finished(page, 2)
    assert focused(page) == "send"
    tab("the")
    tab("the")
    assert {request["prompt"] for request in server.requests} == {"by hand"}
    assert server.requests[-1]["early_exit"].get("consistency", "textual") == "textual"
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    finished(page, 2)
    assert len(server.requests) == 4 and focused(page) == "prompt"
    server.answer = lambda request: [said("the", 2), Watch("left")]
    page.keyboard.press("Control+Enter")
    expect(page.locator(".status")).to_have_text(["running", "running"])
    page.keyboard.press("Escape")
    expect(page.locator(".status")).to_have_text(["cancelled", "cancelled"])
    assert server.gate("left").wait(PATIENCE_S) and focused(page) == "prompt"


def test_every_control_has_a_name(server: ScriptedServer, open_page: OpenPage) -> None:
    server.models = [model(), model("other")]
    page = open_page()
    tree = page.context.new_cdp_session(page)

    def controls() -> dict[str, list[str]]:
        """Names of what can be focused, by role."""
        found: dict[str, list[str]] = {}
        for node in tree.send("Accessibility.getFullAXTree")["nodes"]:
            properties = {each["name"]: each["value"].get("value") for each in node.get("properties", [])}
            role = node.get("role", {}).get("value", "")
            if not node["ignored"] and properties.get("focusable") and role != "RootWebArea":
                found.setdefault(role, []).append(node.get("name", {}).get("value", ""))
        return found

    unanswered = controls()
    page.get_by_label("Side by side").check()
    send(page)
    finished(page, 2)
    answered = controls()
    assert set(answered) >= {"textbox", "button", "slider", "radio", "checkbox", "combobox", "listbox", "option"}
    assert [
        (role, name) for found in (unanswered, answered) for role, names in found.items() for name in names if not name
    ] == []
    assert answered["listbox"] == [
        "Tokens and their layers, Full depth",
        "Tokens and their layers, Early exit, risk tolerance 0.02",
    ]
    assert "quick, layer 5 of 8" in answered["option"]


def test_the_answer_is_announced_once_and_politely(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("the", 2), Wait("rest"), said(" quick", 4), *ending([2, 4])]
    page = open_page()
    send(page)
    expect(page.get_by_role("option")).to_have_count(1)
    region = page.get_by_role("status")
    expect(region).to_have_text("Sent; waiting for the answer.")  # no word of it while it is incomplete
    expect(page.get_by_role("listbox")).to_have_attribute("aria-busy", "true")
    server.open("rest")
    finished(page)
    spoken_of = (
        "Early exit, risk tolerance 0.02, finished: the quick — 2 tokens, mean exit layer 3.00 of 8, certified: yes."
    )
    expect(region.locator("p")).to_have_text(["Sent; waiting for the answer.", spoken_of])
    expect(page.get_by_role("listbox")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".plain")).to_have_text("the quick")
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert live.evaluate_all("all => all.map((each) => each.id)") == ["problem", "said"]


def test_a_phone_of_360_pixels_never_scrolls_sideways(server: ScriptedServer, open_page: OpenPage) -> None:
    wide = [("W" * 200, 3), (" x", 1), (" " + "long" * 30, 8), ("", 2)]
    tolerances = [round(0.01 * n, 2) for n in range(1, 9)]
    server.models = [model("n" * 64, tolerances={"risk": tolerances, "textual": tolerances * 2})]
    server.answer = lambda request: spoken(wide)
    server.models, models = Refusal(503, "z" * 90), server.models
    page = open_page(ready=False, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)

    def fits(when: str) -> None:
        sizes = page.evaluate("[document.documentElement.scrollWidth, innerWidth, visualViewport.scale]")
        assert sizes == [360, 360, 1], when

    expect(page.get_by_role("alert")).to_contain_text("zzz")
    fits("no model")
    server.models = models
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#about")).to_contain_text("n" * 64)
    fits("empty")
    page.get_by_label("Side by side").check()
    page.get_by_label("Show layer numbers").check()
    send(page, "y" * 500)
    finished(page, 2)
    fits("two answers")
    page.get_by_role("option").first.tap()
    expect(page.locator(".readout").first).to_contain_text("layer 3 of 8")
    fits("a token in question")
    page.get_by_label("textual").check()
    fits("many stops")
    server.answer = lambda request: Refusal(400, "z" * 390)
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("zzz")
    fits("an error")


def test_motion_is_only_for_those_who_like_it(server: ScriptedServer, open_page: OpenPage) -> None:
    server.answer = lambda request: [said("the", 2), Wait("rest"), *ending([2])]
    moves = """() => [...document.querySelectorAll('*')].flatMap((each) => ['', '::before', '::after'].map((part) => {
      const style = getComputedStyle(each, part || null);
      return style.animationName !== 'none' || parseFloat(style.transitionDuration) > 0;
    })).filter(Boolean).length"""
    counts = {}
    for motion in ("reduce", "no-preference"):
        page = open_page(reduced_motion=motion)
        send(page)
        expect(page.get_by_role("option")).to_have_count(1)
        counts[motion] = page.evaluate(moves)
    assert counts["reduce"] == 0 < counts["no-preference"]
