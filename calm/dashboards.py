"""The dashboards of ``conf/wandb``: read, and checked against what runs have logged. Nothing of W&B is needed here.

``conf/wandb/NAME.json`` is a dashboard: ``about``, and sections of panels. A panel is ``lines`` or ``bars`` or
``scatter`` of metrics, ``table`` of a logged table, or ``chart``: one of the Vega-Lite specs in ``conf/wandb/charts``,
with a column of a table for each of its fields. ``*`` in a metric of ``lines`` stands for anything (its layers).
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import CONF_DIR
from .errors import ConfigError
from .tracking import STEP, read_metrics

FOLDER = CONF_DIR / "wandb"
KINDS = {  # kind of panel: what it must have beside kind and title, and what it may have
    "lines": ({"x", "y"}, {"y_title"}),
    "bars": ({"y"}, set[str]()),
    "scatter": ({"x", "y"}, set[str]()),
    "table": ({"table"}, set[str]()),
    "chart": ({"chart", "table", "fields"}, set[str]()),
}
PLACEHOLDER = re.compile(r"\$\{field:([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Panel:
    """Of a dashboard; what a kind has not is empty.

    Attributes:
        fields: of a chart: its field -> column of ``table``.
    """

    kind: str
    title: str
    x: str = ""
    y: tuple[str, ...] = ()
    y_title: str = ""
    table: str = ""
    chart: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    name: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    name: str
    about: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for section in self.sections for panel in section.panels]


@dataclass
class Logged:
    """What runs have: names of metrics, and the columns of each table."""

    metrics: set[str] = field(default_factory=lambda: {STEP})
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_dashboards(names: Sequence[str] = (), folder: Path = FOLDER) -> list[Dashboard]:
    """Those asked for; without names all, by name.

    Raises ConfigError for a name that is not there, and for a file that is no dashboard.
    """
    there = sorted(path.stem for path in folder.glob("*.json"))
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigError(f"names: {unknown[0]!r} is no dashboard; there are {', '.join(there)}")
    return [_dashboard(folder / f"{name}.json") for name in names or there]


def read_charts(dashboards: Iterable[Dashboard], folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """By name, the Vega-Lite specs that the dashboards draw with.

    Raises ConfigError for one that is missing, or that W&B could not fill with a table.
    """
    charts: dict[str, dict[str, Any]] = {}
    for dashboard in dashboards:
        for panel in dashboard.panels:
            if panel.chart and panel.chart not in charts:
                charts[panel.chart] = _chart(folder / "charts" / f"{panel.chart}.json")
            if panel.chart and set(panel.fields) != fields_of(charts[panel.chart]):
                raise ConfigError(
                    f"{dashboard.name}: {panel.title!r} gives fields {', '.join(sorted(panel.fields))}, its chart "
                    f"{panel.chart} has {', '.join(sorted(fields_of(charts[panel.chart])))}"
                )
    return charts


def fields_of(chart: Mapping[str, Any]) -> set[str]:
    """The ``${field:...}`` of a Vega-Lite spec."""
    return set(PLACEHOLDER.findall(json.dumps(chart)))


def logged(run_dirs: Iterable[str | Path]) -> Logged:
    """What runs have logged, by their metrics.jsonl.

    Raises ConfigError for a folder without one.
    """
    found = Logged()
    for run_dir in run_dirs:
        try:
            records = read_metrics(run_dir)
        except OSError:
            raise ConfigError(f"check: {run_dir} holds no metrics.jsonl, so no run has logged there") from None
        for record in records:
            if record.get("event") == "table":
                found.tables[record["key"]] = tuple(record["columns"])
            elif "event" not in record:
                found.metrics |= record.keys() - {"step", "time"}
    return found


def check(dashboards: Iterable[Dashboard], runs: Logged) -> None:
    """Raise ConfigError, naming dashboard, panel and key, for the first that no run has."""
    for dashboard in dashboards:
        for panel in dashboard.panels:
            where = f"{dashboard.name}: {panel.title!r}"
            for key in (panel.x, *panel.y):
                if key and not any(pattern(key).fullmatch(name) for name in runs.metrics):
                    raise ConfigError(f"{where} names the metric {key!r}, which no run has logged")
            if panel.table and panel.table not in runs.tables:
                raise ConfigError(f"{where} names the table {panel.table!r}, which no run has logged")
            missing = [column for column in panel.fields.values() if column not in runs.tables[panel.table]]
            if missing:
                raise ConfigError(f"{where} names the column {missing[0]!r}, which table {panel.table!r} has not")


def pattern(key: str) -> re.Pattern[str]:
    """Of the metrics that a key with ``*`` stands for."""
    return re.compile(".*".join(map(re.escape, key.split("*"))))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no JSON object")
    return value


def _dashboard(path: Path) -> Dashboard:
    spec = _read(path)
    try:
        sections = tuple(
            Section(section["name"], tuple(_panel(panel, path) for panel in section["panels"]))
            for section in spec["sections"]
        )
        return Dashboard(path.stem, spec["about"], sections)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no dashboard: {error!r}") from None


def _panel(values: Mapping[str, Any], path: Path) -> Panel:
    given: Collection[str] = set(values) - {"kind", "title"}
    needed, allowed = KINDS.get(values["kind"], (None, set[str]()))
    if needed is None:
        raise ConfigError(f"{path}: {values['kind']!r} is no kind of panel; there are {', '.join(KINDS)}")
    if not needed <= set(given) <= needed | allowed:
        raise ConfigError(f"{path}: panel {values['title']!r} has {', '.join(sorted(given))}; {values['kind']} needs "
                          f"{', '.join(sorted(needed))}")  # fmt: skip
    stars = [key for key in values.get("y", ()) if "*" in key]
    if stars and values["kind"] != "lines":
        raise ConfigError(f"{path}: {stars[0]!r}: a * is for lines only")
    return Panel(**{**values, "y": tuple(values.get("y", ()))})


def _chart(path: Path) -> dict[str, Any]:
    spec = _read(path)
    if "vega-lite" not in str(spec.get("$schema")):
        raise ConfigError(f"{path} has no $schema of Vega-Lite")
    if spec.get("data") != {"name": "wandb"}:
        raise ConfigError(f'{path}: its data must be {{"name": "wandb"}}, which W&B fills')
    if not fields_of(spec):
        raise ConfigError(f"{path} has no ${{field:...}}, so no column of a table would be drawn")
    return spec
