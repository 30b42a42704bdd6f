"""Settings of eval.dashboards; values in ``conf/dashboards.yaml``."""

from dataclasses import dataclass, field


@dataclass
class DashboardsConfig:
    """python -m eval.dashboards."""

    entity: str | None = None  # default: that of the account which is logged in
    project: str = "calm-t5"
    dry_run: bool = False  # say what would be made, make nothing
    names: list[str] = field(default_factory=list)  # of conf/wandb/*.json; default: all
    check: list[str] = field(default_factory=list)  # run folders, which must have every key and column that is named
