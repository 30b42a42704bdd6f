"""What eval.table1 tells W&B: its numbers, its tables, and which model and certificates they are of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.config import Table1Config
from calm.models.speaking import SpeakingModel
from calm.tracking import Tracker
from calm.tracking_cards import calibration_card, folder_name, model_card, report_card
from calm.tracking_tables import track_table1

from .records import Scored


def track(
    config: Table1Config, run_dir: Path, summary: dict[str, Any], model: SpeakingModel, scored: Sequence[Scored]
) -> None:
    """The table's numbers into metrics.jsonl, and with tables and lineage into W&B where that is on."""

    folder, table = Path(summary["checkpoint"]), summary["table1"]
    name = folder_name(folder)
    tracker = Tracker(run_dir, config.tracking, "table1", summary["config"], about=name)
    shown = ("rouge_l", "rouge_l_to_full", "layers_skipped", "mean_layers", "executed_mean")
    values = {f"table1/{row['row']}/{value}": row[value] for row in table for value in shown}
    tracker.log({key: value for key, value in values.items() if value is not None}, 0)
    track_table1(tracker, table, [(each.row.name, each.traces) for each in scored], model.tokenizer)
    tracker.used(model_card(folder))
    for artifact in {each.row.artifact.name: each.row.artifact for each in scored if each.row.artifact}.values():
        tracker.used(calibration_card(artifact, name))
    files = {path.name: path for path in (run_dir / "table1.md", run_dir / "table1.csv", run_dir / "rows.json")}
    about = {key: summary[key] for key in ("metric", "corpus", "rows", "notes", "environment")}
    tracker.made(report_card(f"{name}-table1", files, about))
    tracker.finish()
