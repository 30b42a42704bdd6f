"""Make the dashboards of conf/wandb in Weights & Biases.

    python -m eval.dashboards dry_run=true
    python -m eval.dashboards entity=NAME project=calm-t5
    python -m eval.dashboards dry_run=true check=[runs/train/TIME,runs/calibrate/TIME,runs/table1/TIME]

Training, calibration, evaluation and a comparison of models: a workspace each, and the Vega-Lite charts that they draw
with. With ``check=`` every metric and column that they name must be one that those runs have logged. Writes
summary.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calm.cli import program
from calm.dashboards_config import DashboardsConfig

from .common import say

if TYPE_CHECKING:
    from calm.dashboards import Dashboard, Panel


def run(config: DashboardsConfig, run_dir: Path) -> int:
    from calm.checkpoint import write_json
    from calm.dashboards import check, logged, read_charts, read_dashboards

    dashboards = read_dashboards(config.names)
    charts = read_charts(dashboards)
    if config.check:
        check(dashboards, logged(config.check))
        say(f"every metric and column that they name is in {', '.join(config.check)}")
    made: list[str] = []
    if config.dry_run:
        say("\n".join(told(dashboards)))
    else:
        from calm.tracking_upload import upload

        made = upload(config.entity, config.project, dashboards, charts, say)
    names = [dashboard.name for dashboard in dashboards]
    write_json(run_dir / "summary.json", {"dashboards": names, "charts": sorted(charts), "made": made})
    return 0


def told(dashboards: Sequence["Dashboard"]) -> list[str]:
    """What would be made, in lines."""
    lines = []
    for dashboard in dashboards:
        lines += [f"workspace calm {dashboard.name}: {dashboard.about}"]
        for section in dashboard.sections:
            lines += [f"  {section.name}", *(f"    {_line(panel)}" for panel in section.panels)]
    return lines


def _line(panel: "Panel") -> str:
    if panel.kind == "chart":
        columns = ", ".join(f"{name}={column}" for name, column in panel.fields.items())
        return f"{panel.title}: chart {panel.chart} of {panel.table} ({columns})"
    of = panel.table or ", ".join(panel.y) + (f" over {panel.x}" if panel.x else "")
    return f"{panel.title}: {panel.kind} of {of}"


main = program("dashboards", DashboardsConfig, run)

if __name__ == "__main__":
    main()
