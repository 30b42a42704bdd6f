"""One HTML file of all: what was found first, then every experiment. It opens offline and asks nobody for anything."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from calm.errors import CalmError

from .answer import Answer, Worth
from .collect import Found
from .style import CSS

LOOKS = {Worth.yes: "yes", Worth.no: "no", Worth.open: "open", Worth.unknown: "open"}
LABELS = {"done": "done", "failed": "failed", "running": "cut off", "missing": "missing"}
ICON = "data:image/svg+xml,%3Csvg xmlns=%22http://www.w3.org/2000/svg%22/%3E"
HEIGHT = 460  # pixels of a plot
# a grid is done when its last plot is there: only then each has its width
FIT = "addEventListener('load', () => document.querySelectorAll('.js-plotly-plot').forEach(Plotly.Plots.resize))"
_PLOT = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}


def check_libraries() -> None:
    """Raises CalmError naming the extra where matplotlib or plotly is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise CalmError(
            f"{' and '.join(missing)} not installed; the extra 'report' brings them: pip install calm-t5[report]"
        )


def page(title: str, about: Mapping[str, str], answer: Answer, found: Sequence[Found], report_dir: Path) -> str:
    """The HTML.

    Args:
        about: what it is of (model, corpus, ...), by name.
        report_dir: from which links go to data and figures.
    """
    from plotly.offline import get_plotlyjs

    written = time.strftime("%Y-%m-%d %H:%M")
    drawn = any(each.panels for each in found)
    script = f"<script>{get_plotlyjs()}</script>\n<script>{FIT}</script>" if drawn else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="{ICON}">
<style>{CSS}</style>
{script}
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{_table(about)}
</header>
<main>
{_answer(answer)}
<nav aria-labelledby="contents"><h2 id="contents">Experiments</h2>
<ol>{"".join(_entry(each) for each in found)}</ol></nav>
{"".join(_experiment(each, report_dir) for each in found)}
</main>
<footer>Intervals are 95 %, those of clocks of the median of six rounds or more, of
fewer their range. A share of layers is no speed-up: speeds are
measured clocks, beside full depth of the same engine. Written {written} by eval.report.</footer>
</body>
</html>
"""


def _answer(answer: Answer) -> str:
    parts = "".join(
        f"<h3>{escape(name)}</h3><ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        for name, texts in answer.sentences.items()
    )
    return (
        f'<section class="answer {LOOKS[answer.worth]}" aria-labelledby="answer"><h2 id="answer">The answer</h2>'
        f'<p class="headline">{escape(answer.headline)}</p>{parts}</section>'
    )


def _state(found: Found) -> str:
    return f'<span class="state {escape(found.state)}">{escape(LABELS.get(found.state, found.state))}</span>'


def _entry(found: Found) -> str:
    return f'<li><a href="#{escape(found.experiment.name)}">{escape(found.experiment.title)}</a>{_state(found)}</li>'


def _experiment(found: Found, report_dir: Path) -> str:
    name = escape(found.experiment.name)
    said = "".join(f"<li>{escape(text)}</li>" for text in found.said)
    flags = "".join(f'<p class="flag">{escape(flag)}</p>' for flag in found.flags)
    why = f'<p class="flag">{escape(found.why)}</p>' if found.why else ""
    return f"""
<section class="experiment" id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title">{escape(found.experiment.title)} {_state(found)}</h2>
<p class="question">{escape(found.experiment.question)}</p>
{why}{flags}
{f"<ul class='said'>{said}</ul>" if said else ""}
{_plots(found)}
<pre><code>{escape(found.command)}</code></pre>
{_files(found, report_dir)}
{_stamp(found)}
</section>
"""


def _plots(found: Found) -> str:
    """A figure for each panel, so that they stand below each other on a phone."""
    if not found.panels:
        return ""
    from calm.report_plots import interactive

    parts = []
    for number, panel in enumerate(found.panels):
        figure = interactive([literal(panel)])
        figure.update_layout(autosize=True, height=HEIGHT, font_size=11, margin={"t": 40})
        figure.update_annotations(font_size=12)
        for axis in (figure.update_xaxes, figure.update_yaxes):
            axis(title_font_size=12)
        html = figure.to_html(
            full_html=False, include_plotlyjs=False, config=_PLOT, div_id=f"plot-{found.experiment.name}-{number}"
        )
        label = escape(f"{panel.title}: {panel.y} against {panel.x}", quote=True)
        parts.append(f'<figure role="group" aria-label="{label}">{html}</figure>')
    return f'<div class="plots">{"".join(parts)}</div>'


def literal(panel: Any) -> Any:
    """The same panel with its texts as text: plotly would read tags in them."""

    def text(value: Any) -> Any:
        return escape(value, quote=False) if isinstance(value, str) else value

    series = [
        replace(each, name=text(each.name), x=[text(x) for x in each.x],
                text=None if each.text is None else [text(said) for said in each.text])
        for each in panel.series
    ]  # fmt: skip
    levels = [replace(each, name=text(each.name)) for each in panel.levels]
    return replace(panel, title=text(panel.title), x=text(panel.x), y=text(panel.y), series=series, levels=levels)


def _files(found: Found, report_dir: Path) -> str:
    links = [
        f'<li><a href="{escape(_address(path, report_dir), quote=True)}">{escape(path.name)}</a></li>'
        for path in found.files
    ]
    return f'<ul class="files">{"".join(links)}</ul>' if links else ""


def _address(path: Path, report_dir: Path) -> str:
    from urllib.parse import quote

    return quote(Path(os.path.relpath(path.absolute(), report_dir.absolute())).as_posix())


def _stamp(found: Found) -> str:
    if found.summary is None:
        return ""
    environment = found.summary.get("environment") or {}
    git = environment.get("git") or {}
    rows = {
        "started": found.summary.get("started"),
        "took": f"{found.seconds:.0f} s",
        "commit": f"{git.get('commit')}{' (dirty)' if git.get('dirty') else ''}",
        "machine": ", ".join(str(environment[name]) for name in ("cpu", "gpu") if environment.get(name)),
        "cores, threads": f"{environment.get('cores')}, {environment.get('threads')}",
        "platform": environment.get("platform"),
        "python": environment.get("python"),
        "packages": ", ".join(f"{name} {version}" for name, version in (environment.get("packages") or {}).items()),
        "metric": found.summary.get("metric"),
        "settings": json.dumps(found.summary.get("config"), ensure_ascii=False),
    }  # fmt: skip
    shown = {name: str(value) for name, value in rows.items() if value not in (None, "", "null")}
    return f"<details><summary>Where the numbers come from</summary>{_table(shown)}</details>"


def _table(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th scope='row'>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in values.items())
    return f"<table><tbody>{rows}</tbody></table>"
