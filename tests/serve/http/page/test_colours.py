"""Every text can be read, and the shades of layers keep their order for every eye."""

import pytest

from .looking import OpenPage, expect, finished, send
from .scripted_server import NUM_LAYERS, ScriptedServer, model, spoken

pytestmark = pytest.mark.slow

CONTRAST = 4.5  # WCAG 2 AA, of text
# Colours as they are painted, sRGB 0..255: a canvas tells what any notation of CSS means.
PAINTED = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const painted = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = painted(getComputedStyle(each).backgroundColor);
    if (color[3] === 255) return color.slice(0, 3);
  }
  return [255, 255, 255];
};
"""
Matrix = list[list[float]]
ALL_CONES: Matrix = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
# What the eye without one kind of cone makes of linear sRGB: Machado, Oliveira and Fernandes 2009, severity 1.
DICHROMATS: dict[str, Matrix] = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def luminance(color: list[float], eye: Matrix = ALL_CONES) -> float:
    """Relative luminance of WCAG 2, of what an eye sees of a colour."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    red, green, blue = (sum(m * c for m, c in zip(row, linear, strict=True)) for row in eye)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def every_layer(layers: int = NUM_LAYERS) -> list[tuple[str, int]]:
    return [(f" {layer}", layer) for layer in range(1, layers + 1)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_readable(scheme: str, server: ScriptedServer, open_page: OpenPage) -> None:
    server.models = [model(), model("other")]
    server.answer = lambda request: (
        spoken(every_layer()) if "policy" in request["early_exit"] else spoken(every_layer(), certified=False)[:-1]
    )
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    page.get_by_label("Side by side").check()
    page.get_by_label("Show layer numbers").check()
    send(page)
    expect(page.locator(".status")).to_have_text(["finished", "failed"])
    found = page.evaluate(
        "() => {"
        + PAINTED
        + """
        const own = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        const shown = [...document.querySelectorAll('body *')].filter(
          (each) => own(each) && each.checkVisibility() && !each.closest('.unseen, noscript, option'));
        return shown.map((each) => [
          each.className + ' ' + each.textContent.slice(0, 30), painted(getComputedStyle(each).color), behind(each)]);
        }"""
    )
    assert len(found) > 60
    poor = {
        name: round(contrast(text[:3], back), 2) for name, text, back in found if contrast(text[:3], back) < CONTRAST
    }
    assert poor == {}
    on_shades = [contrast(text[:3], back) for name, text, back in found if name.startswith("token ")]
    assert len(on_shades) == 2 * NUM_LAYERS


@pytest.mark.parametrize(("scheme", "deeper"), [("light", -1), ("dark", 1)])
def test_deeper_layers_stand_out_more_from_the_page_for_every_eye(
    scheme: str, deeper: int, server: ScriptedServer, open_page: OpenPage
) -> None:
    server.models = [model(num_layers=12, exit_layers=list(range(1, 12)))]
    server.answer = lambda request: spoken(every_layer(12))
    page = open_page(color_scheme=scheme)
    send(page)
    finished(page)
    shades = page.evaluate("() => {" + PAINTED + "return [...document.querySelectorAll('.token')].map(behind); }")
    for name, eye in {"all cones": ALL_CONES, **DICHROMATS}.items():
        steps = [deeper * luminance(shade, eye) for shade in shades]
        assert len(steps) == 12 and steps == sorted(set(steps)), name
        low, high = sorted((abs(steps[0]), abs(steps[-1])))
        assert (high + 0.05) / (low + 0.05) > 2, name


def test_shades_stay_where_colours_are_forced(open_page: OpenPage) -> None:
    page = open_page(forced_colors="active")
    send(page)
    finished(page)
    shades = page.get_by_role("option").evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
    assert len(set(shades)) == 3
