"""Dashboards into W&B: charts as presets of an account, panels as a workspace of a project."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .dashboards import Dashboard, Panel, pattern
from .errors import ConfigError
from .tracking import has_api_key

PREFIX = "calm-"  # of the names that charts have in an account


def upload(
    entity: str | None,
    project: str,
    dashboards: Sequence[Dashboard],
    charts: Mapping[str, dict[str, Any]],
    say: Callable[[str], None],
) -> list[str]:
    """Make every chart, then a workspace for each dashboard. Returns the addresses of the workspaces.

    Raises:
        ConfigError: no account is logged in, wandb-workspaces is not installed, or W&B refuses.
    """
    if not has_api_key():
        raise ConfigError(
            "no account of W&B is logged in: run `wandb login`, or set WANDB_API_KEY; dry_run=true shows what would be "
            "made without one"
        )
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ConfigError(
            "workspaces need the package wandb-workspaces, which the extra 'dashboards' brings; pip install "
            "wandb-workspaces, or see with dry_run=true what would be made"
        ) from None
    import wandb

    made = []
    try:
        api = wandb.Api()
        owner = entity or str(api.default_entity)
        for name, spec in charts.items():
            say(f"chart {owner}/{PREFIX}{name}: {_make_chart(api, owner, name, spec)}")
        for dashboard in dashboards:
            space = workspace(owner, project, dashboard, workspaces, reports)
            space.save()
            made.append(str(space.url))
            say(f"workspace {space.name}: {space.url}")
    except ConfigError:
        raise
    except Exception as error:  # the network, a right that is missing, a name that is no entity: all are W&B's to say
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"W&B refused: {reason}; check entity= and project=, or dry_run=true") from error
    return made


def _make_chart(api: Any, owner: str, name: str, spec: Mapping[str, Any]) -> str:
    """Presets cannot be changed by their API, so one that is there stays."""
    shown = name.replace("_", " ")
    try:
        api.create_custom_chart(
            entity=owner, name=PREFIX + name, display_name=f"calm: {shown}", spec_type="vega2", access="private",
            spec=dict(spec),
        )  # fmt: skip
    except Exception as error:
        if "exist" not in str(error).lower() and "duplicate" not in str(error).lower():
            raise
        return "is there already; delete it in W&B to have it made anew"
    return "made"


def workspace(owner: str, project: str, dashboard: Dashboard, workspaces: Any, reports: Any) -> Any:
    """A dashboard as an object of wandb-workspaces, not yet saved.

    Args:
        workspaces, reports: modules ``wandb_workspaces.workspaces`` and ``wandb_workspaces.reports.v2``.
    """
    sections = [
        workspaces.Section(
            name=section.name, panels=[_panel(panel, owner, reports) for panel in section.panels], is_open=True
        )
        for section in dashboard.sections
    ]
    return workspaces.Workspace(entity=owner, project=project, name=f"calm {dashboard.name}", sections=sections)


def _panel(panel: Panel, owner: str, reports: Any) -> Any:
    match panel.kind:
        case "lines":
            lines = {"title": panel.title, "x": panel.x, **({"title_y": panel.y_title} if panel.y_title else {})}
            if any("*" in key for key in panel.y):
                return reports.LinePlot(**lines, metric_regex="|".join(f"^{pattern(key).pattern}$" for key in panel.y))
            return reports.LinePlot(**lines, y=list(panel.y))
        case "bars":
            return reports.BarPlot(title=panel.title, metrics=list(panel.y))
        case "scatter":
            return reports.ScatterPlot(title=panel.title, x=_summary(panel.x, reports), y=_summary(panel.y[0], reports))
        case "table":
            return reports.WeavePanelSummaryTable(table_name=panel.table)
    return reports.CustomChart(
        query={"summaryTable": {"tableKey": panel.table}}, chart_name=f"{owner}/{PREFIX}{panel.chart}",
        chart_fields=dict(panel.fields), chart_strings={},
    )  # fmt: skip


def _summary(key: str, reports: Any) -> Any:
    return reports.SummaryMetric(key)
