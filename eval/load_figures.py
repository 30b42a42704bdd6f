"""The figure of a load: what a rate costs in latency and brings in tokens, for every way of decoding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import can_draw, say

NAME = "serving.png"
LATENCIES = (("time to first token", "ttft"), ("time per output token", "tpot"), ("whole answer", "e2el"))


def draw_figure(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """One PNG; its name. Says so where matplotlib is not installed, or nothing was completed."""
    rows = figure_rows(summary)
    if not can_draw():
        return []
    if not rows:
        say("no figure: no request was completed")
        return []
    import pandas as pd

    from calm.plotting import plot_load

    axes = plot_load(pd.DataFrame(rows), headline(summary))
    axes[0].figure.savefig(run_dir / NAME, dpi=150)
    return [NAME]


def headline(summary: Mapping[str, Any]) -> str:
    """What was measured, for who sees the picture alone."""
    config = summary["config"]
    shape = "Poisson" if config["burstiness"] == 1 else f"burstiness {config['burstiness']}"
    late = " (the client was late)" if summary["client_late"] else ""
    return (
        f"{summary['served_model']}: {config['n']} requests a point, {summary['prompts']}; {shape} arrivals, "
        f"latencies from when a request was due{late}"
    )


def figure_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Points of all panels: latencies as median and highest percentile, then output tokens a second.

    A point is marked where something failed or the client was late.
    """
    percentiles = summary["config"]["percentiles"]
    high = f"p{max(percentiles):g}"
    rows = []
    for record in summary["cells"]:
        if not record["completed"]:
            continue
        marked = bool(record["failed"] or record["client_late"])
        point = {"way": record["way"], "rate": float(record["rate"]), "marked": marked}
        for title, name in LATENCIES:
            values = record if name == "tpot" else record["from_scheduled"]
            if values[f"median_{name}_ms"] is not None:
                told = {"value": values[f"median_{name}_ms"], "high": values[f"{high}_{name}_ms"]}
                rows.append({"panel": title, "label": f"ms (dashed: {high})", **point, **told})
        rows.append({"panel": "throughput", "label": "output tokens a second", **point,
                     "value": record["output_throughput"], "high": None})  # fmt: skip
    order = [title for title, _ in LATENCIES] + ["throughput"]
    return sorted(rows, key=lambda row: order.index(row["panel"]))
