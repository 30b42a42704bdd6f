"""The small tables of a run that dashboards are drawn from: certified thresholds, Table 1, exit layers, tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .tracking_cards import calibration_card

if TYPE_CHECKING:
    from .calibration import Artifact
    from .calibration.grid import Threshold
    from .records import DecodeTrace
    from .tracking import Tracker

Row = list[Any]
RISK = "calibration/risk"
RISK_COLUMNS = (
    "measure", "consistency", "schedule", "tolerance", "threshold", "mean_loss", "p_value", "layers_skipped",
    "certified",
)  # fmt: skip
TABLE1 = "table1/rows"
TABLE1_COLUMNS = (
    "row", "measure", "threshold_first", "threshold_last", "tolerance", "picked", "rouge_l", "rouge_l_low",
    "rouge_l_high", "rouge_l_to_full", "layers_skipped", "mean_layers", "executed_mean", "articles",
)  # fmt: skip
EXITS = "table1/exits"
EXITS_COLUMNS = ("row", "layer", "share", "tokens")
TRACES = "table1/traces"
TRACES_COLUMNS = ("row", "article", "position", "token", "exit_layer", "confidence")
SHOWN_ARTICLES = 50


def lowest(threshold: "Threshold") -> float:
    """One number for a threshold: of those per layer the lowest."""
    return min(threshold) if isinstance(threshold, tuple) else threshold


def risk_rows(artifacts: Sequence["Artifact"]) -> list[Row]:
    """A row for each tolerance and threshold that was decoded, in the order of testing."""
    rows = []
    for artifact in artifacts:
        for certificate in artifact.certificates:
            about = [artifact.measure.value, artifact.consistency.value, artifact.schedule.value, certificate.tolerance]
            rows += [
                [*about, lowest(artifact.grid[i]), artifact.mean_losses[i], p_value, artifact.layers_skipped[i],
                 i < len(certificate.certified)]
                for i, p_value in enumerate(certificate.p_values)
            ]  # fmt: skip
    return rows


def certified_values(artifacts: Sequence["Artifact"]) -> list[dict[str, float]]:
    """For each tolerance what each measure has certified: a point of a run's metrics."""
    points: dict[float, dict[str, float]] = {}
    for artifact in artifacts:
        for certificate in artifact.certificates:
            point = points.setdefault(certificate.tolerance, {"calibration/tolerance": certificate.tolerance})
            last, name = len(certificate.certified) - 1, f"calibration/{artifact.measure.value}"
            point[f"{name}/threshold"] = lowest(certificate.threshold)
            point[f"{name}/mean_loss"] = artifact.mean_losses[last]
            point[f"{name}/layers_skipped"] = artifact.layers_skipped[last]
    return list(points.values())


def track_calibration(tracker: "Tracker", artifacts: Sequence["Artifact"], model: str) -> None:
    """Risk table and certificates of a calibration. ``model`` is what the folder is called in W&B."""
    tracker.table(RISK, RISK_COLUMNS, risk_rows(artifacts))
    for artifact in artifacts:
        tracker.made(calibration_card(artifact, model))


def table1_rows(table: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Of the ``table1`` of a summary."""
    return [[row[name] for name in TABLE1_COLUMNS] for row in table]


def exit_rows(table: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Share of tokens by the layer that gave them, of every decoded row of a summary's ``table1``."""
    return [
        [row["row"], layer, count / row["tokens"], count]
        for row in table
        if row["exit_histogram"] and row["tokens"]
        for layer, count in enumerate(row["exit_histogram"], start=1)
    ]


def trace_rows(row: str, traces: Sequence["DecodeTrace"], word: Callable[[int], str]) -> list[Row]:
    """Token by token what a row of Table 1 did, of its first articles.

    The confidence is that of the layer which the token left at; None where nothing was asked there: at the last layer,
    and in rows whose depth is fixed.

    Args:
        word: of a token id.
    """
    rows: list[Row] = []
    for trace in traces[:SHOWN_ARTICLES]:
        for position, (token, layer) in enumerate(zip(trace.tokens, trace.emission_layers, strict=True)):
            asked = trace.confidences[position][layer - 1] if trace.confidences else math.nan
            confidence = None if math.isnan(asked) else round(asked, 6)
            rows.append([row, trace.id, position + 1, word(token), layer, confidence])
    return rows


def track_table1(
    tracker: "Tracker",
    table: Sequence[Mapping[str, Any]],
    answers: Sequence[tuple[str, Sequence["DecodeTrace"] | None]],
    tokenizer: Any,
) -> None:
    """Table 1, its exit layers, and the first answers of those rows that exit by a confidence.

    Args:
        answers: row by row of the table; None of one that was not decoded.
        tokenizer: of the model.
    """
    by_confidence = {row["row"] for row in table if row["measure"] is not None}
    tracker.table(TABLE1, TABLE1_COLUMNS, table1_rows(table))
    tracker.table(EXITS, EXITS_COLUMNS, exit_rows(table))
    told: list[Row] = []
    for name, traces in answers:
        if name in by_confidence and traces is not None:
            told += trace_rows(name, traces, lambda token: str(tokenizer.convert_ids_to_tokens(token)))
    tracker.table(TRACES, TRACES_COLUMNS, told)
