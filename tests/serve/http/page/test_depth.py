"""The slider over certified tolerances, the consistency, and the choice of a model."""

import pytest

from .looking import OpenPage, expect, finished, histogram, send
from .scripted_server import Json, ScriptedServer, model, spoken

pytestmark = pytest.mark.slow


def test_the_stops_of_the_slider_are_the_certified_tolerances(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page()
    slider = page.get_by_role("slider", name="Certified tolerance")
    expect(page.locator("#stops span")).to_have_text(["full", "0.02", "0.05", "0.1"])
    assert (slider.get_attribute("min"), slider.get_attribute("max"), slider.get_attribute("step")) == ("0", "3", "1")
    said_by_stop = ["full depth", "0.02, risk", "0.05, risk", "0.1, risk"]
    for stop, text in enumerate(said_by_stop):
        slider.fill(str(stop))
        assert slider.evaluate("each => each.ariaValueText") == text
        send(page)
        finished(page)
    full = {"policy": "full", "layers": True}
    risk = [{"tolerance": value, "consistency": "risk", "layers": True} for value in (0.02, 0.05, 0.1)]
    assert [request["early_exit"] for request in server.requests] == [full, *risk]
    slider.fill("0")
    expect(page.get_by_label("Side by side")).to_be_disabled()
    expect(page.locator("#tolerance-says")).to_have_text("Full depth: every token runs all 8 layers.")


def test_another_consistency_has_its_own_stops_and_is_never_less_careful(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    page = open_page()
    slider, choice = page.get_by_role("slider"), page.get_by_role("group", name="Consistency")
    labels = page.locator("#stops span")
    expect(choice.get_by_label("risk")).to_be_checked()
    slider.fill("3")
    choice.get_by_label("textual").check()
    expect(labels).to_have_text(["full", "0.05", "0.2"])
    expect(page.locator("#stops .chosen")).to_have_text("0.05")  # 0.1 is none of its own: the next more careful one
    slider.fill("2")
    choice.get_by_label("risk").check()
    expect(page.locator("#stops .chosen")).to_have_text("0.1")
    slider.fill("1")
    choice.get_by_label("textual").check()
    expect(page.locator("#stops .chosen")).to_have_text("full")  # nothing is as careful as 0.02 but full depth
    slider.fill("2")
    send(page)
    finished(page)
    assert server.requests[0]["early_exit"] == {"tolerance": 0.2, "consistency": "textual", "layers": True}
    expect(page.get_by_role("heading", name="Early exit, textual tolerance 0.2")).to_be_visible()


@pytest.mark.parametrize(
    ("tolerances", "labels", "asked"),
    [
        ({"textual": [0.2, 0.1]}, ["full", "0.1", "0.2"], {"tolerance": 0.1, "consistency": "textual", "layers": True}),
        ({"risk": [0.05], "textual": []}, ["full", "0.05"], {"tolerance": 0.05, "consistency": "risk", "layers": True}),
        ({"risk": [], "textual": []}, ["full"], {"policy": "full", "layers": True}),
        ({}, ["full"], {"policy": "full", "layers": True}),
    ],
)
def test_a_model_with_one_consistency_or_without_a_certificate(
    tolerances: Json, labels: list[str], asked: Json, server: ScriptedServer, open_page: OpenPage
) -> None:
    server.models = [model(tolerances=tolerances, measure=None)]
    page = open_page()
    expect(page.locator("#stops span")).to_have_text(labels)
    expect(page.locator("#consistency")).to_be_hidden()
    if labels == ["full"]:
        expect(page.get_by_role("slider")).to_be_disabled()
        expect(page.locator("#tolerance-says")).to_contain_text("certified for no tolerance")
    send(page)
    finished(page)
    assert server.requests[0]["early_exit"] == asked


@pytest.mark.parametrize(
    ("consistency", "tolerance", "label"),
    [("textual", 0.2, "0.2"), ("textual", None, "0.05"), ("risk", 0.1, "0.1"), ("risk", 0.07, "0.02")],
)
def test_the_server_s_default_is_chosen_at_first(
    consistency: str, tolerance: float | None, label: str, server: ScriptedServer, open_page: OpenPage
) -> None:
    server.models = [model(default_consistency=consistency, default_tolerance=tolerance)]
    page = open_page()
    expect(page.get_by_label(consistency)).to_be_checked()
    expect(page.locator("#stops .chosen")).to_have_text(label)


def test_one_of_several_models(server: ScriptedServer, open_page: OpenPage) -> None:
    deep = model("deep", num_layers=24, exit_layers=[4, 8, 12, 20], tolerances={"risk": [0.3]}, measure="state")
    server.models = [model(), deep]
    server.answer = lambda request: spoken([("a", 4), (" b", 24), (" c", 4)])
    page = open_page()
    page.get_by_label("Model").select_option("deep")
    expect(page.locator("#about")).to_have_text(
        "deep · 24 decoder layers · exits after 4, 8, 12, 20 · confidence: state"
    )
    expect(page.locator("#stops span")).to_have_text(["full", "0.3"])
    send(page)
    finished(page)
    assert server.requests[0]["model"] == "deep"
    assert histogram(page) == {4: 2, 8: 0, 12: 0, 20: 0, 24: 1}
