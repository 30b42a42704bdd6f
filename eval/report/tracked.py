"""What a report tells W&B: its answer and states, of which model and certificates it is, and the page itself."""

from pathlib import Path
from typing import Any

from calm.calibration import load_artifacts
from calm.checkpoint import MANIFEST
from calm.config import TrackingConfig
from calm.tracking import Tracker
from calm.tracking_cards import calibration_card, folder_name, model_card, report_card

FILES = ("report.html", "summary.json", "checklist.md")


def track(config: TrackingConfig, run_dir: Path, summary: dict[str, Any]) -> None:
    """Into metrics.jsonl, and with its lineage into W&B where that is on.

    A folder without a manifest has no hashes to be known by (a plain T5 of others), so nothing is said to be its.
    """
    folder = Path(summary["checkpoint"])
    ours = (folder / MANIFEST).is_file()
    name = folder_name(folder) if ours else folder.name
    tracker = Tracker(run_dir, config, "report", summary["config"], about=name)
    states = summary["experiments"]
    values: dict[str, Any] = {f"report/{each}/seconds": found["seconds"] for each, found in states.items()}
    done = sum(found["state"] == "done" for found in states.values())
    tracker.log({**values, "report/done": done, "report/worth": summary["worth"]}, 0)
    rows = [[each, found["state"], sentence] for each, found in states.items() for sentence in found["said"]]
    tracker.table("report/said", ["experiment", "state", "sentence"], rows)
    if ours:
        tracker.used(model_card(folder))
        for artifact in load_artifacts(folder):
            tracker.used(calibration_card(artifact, name))
    files = {each: run_dir / each for each in FILES if (run_dir / each).is_file()}
    tracker.made(report_card(f"{name}-report", files, {"answer": summary["answer"]}))
    tracker.finish()
