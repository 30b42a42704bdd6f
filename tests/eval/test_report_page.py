"""The page of a report: well-formed, of text that is text, and complete in itself; its checklist of figures."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from calm.config import TrackingConfig, TrackingMode
from calm.errors import CalmError
from calm.experiment_config import ReportConfig
from calm.report_plots import FIGURES, panels_of
from calm.report_plots.panels import Level, Panel, Series
from eval.experiment import UNFINISHED
from eval.report import __main__ as program
from eval.report import page
from eval.report.answer import Answer, Worth
from eval.report.checklist import checks, failing, told_apart
from eval.report.collect import Found
from eval.report.experiments import EXPERIMENTS

UNTRACKED = TrackingConfig(TrackingMode.disabled)

RESULTS = Path(__file__).parents[2] / "results/debian_report"
UNKEPT = {"skipdecode"}  # its record is of other models: results/skipdecode
KEPT = sorted(FIGURES.keys() - UNKEPT)
VOID = ("meta", "link", "br", "img", "hr")
HOSTILE = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\"'&"


def kept(name: str) -> Path:
    """Where a record is: with the report, or of a run of its own."""
    return (RESULTS if (RESULTS / name).is_dir() else RESULTS.parent) / name


def record(name: str) -> Any:
    return json.loads((kept(name) / "summary.json").read_text())


class Reader(HTMLParser):
    """Tags that are open, and what the page would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [str(values[name]) for name in ("src", "href", "action") if name in values]
        self.ids += [str(values["id"])] if "id" in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the records that are kept, without running anything."""
    folder = tmp_path_factory.mktemp("report")
    for name in KEPT:
        shutil.copytree(kept(name), folder / name)
    (folder / "of" / "model").mkdir(parents=True)
    config = ReportConfig(str(folder / "of" / "model"), run=False, tracking=UNTRACKED)
    assert program.run(config, folder) == (UNFINISHED if UNKEPT else 0)
    return folder


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_the_page_is_well_formed_and_asks_for_nothing(report: Path) -> None:
    text = (report / "report.html").read_text()
    reader = read(text)
    assert reader.open == [] and len(set(reader.ids)) == len(reader.ids)
    for address in reader.addresses:
        assert address.startswith(("#", "data:")) or (report / address).is_file(), address
    assert not re.search(r"@import|url\(", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    for name in KEPT:
        assert f'id="{name}"' in text and f"{name}/summary.json" in reader.addresses
    summary = json.loads((report / "summary.json").read_text())
    assert {name: each["state"] for name, each in summary["experiments"].items() if name in KEPT} == dict.fromkeys(
        KEPT, "done"
    )
    assert all(summary["experiments"][name]["said"] for name in KEPT)


def test_text_is_text_wherever_it_comes_from(tmp_path: Path) -> None:
    panel = Panel(HOSTILE, "x", "y", [Series(HOSTILE, [HOSTILE], [1.0], text=[HOSTILE])], [Level(HOSTILE, 1)])
    experiment = replace(EXPERIMENTS[0], name="one", title=HOSTILE, question=HOSTILE)
    found = Found(
        experiment, "failed", HOSTILE, HOSTILE, tmp_path, 1.0, {"config": {"a": HOSTILE}}, [HOSTILE], [panel], [HOSTILE]
    )
    answer = Answer(Worth.no, HOSTILE, {HOSTILE: [HOSTILE]})
    text = page.page(HOSTILE, {HOSTILE: HOSTILE}, answer, [found], tmp_path)
    reader = read(text)
    assert reader.open == [] and "x" not in reader.addresses
    assert text.count("<img") == 0 and "<script>window.hit" not in text


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CalmError, match="matplotlib and plotly not installed; the extra 'report' brings them"):
        page.check_libraries()


@pytest.mark.parametrize("name", KEPT)
def test_every_figure_is_readable_as_far_as_can_be_computed(name: str) -> None:
    for panel in panels_of(name, record(name)):
        assert [f"{check.name}: {check.told}" for check in failing(panel)] == [], panel.title


def test_the_checks_can_fail() -> None:
    line = Series("a", [1, 2], [1, 2])
    good = Panel("title", "x (s)", "y (%)", [line, replace(line, name="b", marker="s")], [Level("full depth", 1)])
    assert failing(good) == []
    for name, bad in {
        "axes": replace(good, y=""),
        "title": replace(good, title="title " * 20),
        "baseline": replace(good, levels=()),
        "colours": replace(good, series=[replace(line, color="#ff0000")]),
        "without colours": replace(good, series=[line, replace(line, name="b", color="#d55e00")]),
    }.items():
        assert [check.name for check in failing(bad)] == [name]
    assert all(check.told for check in checks(good))
    assert told_apart(replace(line, kind="points", x=["a", "b"]), replace(line, kind="points", x=["c", "d"]))


FITS = """() => [...document.querySelectorAll('.js-plotly-plot')].every(
    plot => plot.querySelector('.main-svg').clientWidth <= plot.parentElement.clientWidth + 1)"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser_without_a_net(report: Path, width: int, scheme: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True)
        shown = context.new_page()
        shown.on("console", lambda line: said.append(line.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto((report / "report.html").as_uri())
        playwright.expect(shown.locator(".plots .main-svg").first).to_be_visible(timeout=60_000)
        panels = sum(len(panels_of(name, record(name))) for name in KEPT)
        assert shown.locator(".js-plotly-plot").count() == panels
        # Plotly redraws to a new width by timers, after the page has loaded.
        shown.wait_for_function(FITS, timeout=60_000)
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert said == [] and asked == [(report / "report.html").as_uri()]
