"""Scores of decoded rows, and the files that keep them: one record per article and row of the table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from calm.calibration.grid import point_to_json
from calm.metrics import bootstrap_ci, depth_summary, lead1, mean, rouge_l_many
from calm.papers import PaperRow
from calm.records import DecodeTrace, Example

from .rows import Row, bounds

PER_TOKEN = ("tokens", "crossing_layers", "emission_layers", "executed_layers", "backfilled_layers")


@dataclass
class Scored:
    """A row's answers and what they are worth, article by article.

    Attributes:
        traces: None for lead-1.
        rouge_l, rouge_l_to_full: per article, in the order of the articles.
        wall_s: of the decode; rows of the same policy share one. None for lead-1.
    """

    row: Row
    texts: list[str]
    traces: list[DecodeTrace] | None
    rouge_l: Float[np.ndarray, " rows"]
    rouge_l_to_full: Float[np.ndarray, " rows"]
    wall_s: float | None


def check_whole(traces: Sequence[DecodeTrace], examples: Sequence[Example]) -> None:
    """Raise ValueError unless there is exactly one trace for every article, in order."""
    got, wanted = [trace.id for trace in traces], [example.id for example in examples]
    if got != wanted:
        raise ValueError(f"{len(got)} traces for {len(wanted)} articles, or in another order")


def score(
    row: Row,
    examples: Sequence[Example],
    traces: list[DecodeTrace] | None,
    full: Sequence[DecodeTrace],
    wall_s: float | None = None,
) -> Scored:
    """ROUGE-L of a row's answers to the references and to the full model's answers.

    Equal tokens count 1 to the full model, whatever ROUGE says of them.
    """
    if traces is None:
        texts = [lead1(example.source) for example in examples]
        same = np.zeros(len(texts), dtype=bool)
    else:
        check_whole(traces, examples)
        texts = [trace.text for trace in traces]
        same = np.array([a.tokens == b.tokens for a, b in zip(traces, full, strict=True)])
    to_full = np.where(same, 1.0, rouge_l_many(texts, [trace.text for trace in full]))
    return Scored(row, texts, traces, rouge_l_many(texts, [e.target for e in examples]), to_full, wall_s)


def table_row(scored: Scored, num_layers: int, seed: int, bootstrap: int, paper: PaperRow | None) -> dict[str, Any]:
    """One entry of ``summary.json``'s ``table1``. ``n`` is of the calibration, ``articles`` of the test."""
    row, certificate, artifact = scored.row, scored.row.certificate, scored.row.artifact
    low, high = bootstrap_ci(scored.rouge_l, seed, bootstrap)
    depth = depth_summary(scored.traces, num_layers) if scored.traces is not None else {}
    first, last = bounds(row.schedule)
    return {
        "row": row.name,
        "measure": None if row.measure is None else row.measure.value,
        "threshold": None if row.schedule is None else point_to_json(row.schedule.threshold),
        "threshold_first": first,
        "threshold_last": last,
        "schedule": None if row.schedule is None else row.schedule.kind.value,
        "consistency": None if artifact is None else artifact.consistency.value,
        "tolerance": certificate.tolerance if certificate is not None and row.certified else None,
        "error_prob": None if artifact is None else artifact.error_prob,
        "test_level": None if artifact is None else artifact.test_level,
        "n": None if artifact is None else artifact.n,
        "picked": row.picked,
        "articles": len(scored.texts),
        "rouge_l": mean(scored.rouge_l),
        "rouge_l_low": low,
        "rouge_l_high": high,
        "rouge_l_to_full": mean(scored.rouge_l_to_full),
        "layers_skipped": depth.get("layers_skipped"),
        "mean_layers": depth.get("mean_layers"),
        "crossing_mean": depth.get("mean_crossing"),
        "executed_mean": depth.get("mean_executed"),
        "backfilled_mean": depth.get("mean_backfilled"),
        "layers_not_run": depth.get("layers_not_run"),
        "tokens": depth.get("tokens"),
        "exit_histogram": depth.get("emission_histogram"),
        "wall_s": scored.wall_s,
        "paper": None if paper is None else {key: value for key, value in vars(paper).items() if value is not None},
    }


def write_records(path: Path, examples: Sequence[Example], table: Sequence[Scored]) -> None:
    """``records.parquet``: id, family, row, text, reference, scores, and per token its id and layers as lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {
        name: []
        for name in ("id", "family", "row", "text", "reference", "rouge_l", "rouge_l_to_full", "finished", *PER_TOKEN)
    }
    for scored in table:
        for i, example in enumerate(examples):
            trace = None if scored.traces is None else scored.traces[i]
            values = {
                "id": example.id,
                "family": example.family,
                "row": scored.row.name,
                "text": scored.texts[i],
                "reference": example.target,
                "rouge_l": float(scored.rouge_l[i]),
                "rouge_l_to_full": float(scored.rouge_l_to_full[i]),
                "finished": None if trace is None else trace.finished,
                **{name: None if trace is None else list(getattr(trace, name)) for name in PER_TOKEN},
            }
            for name, value in values.items():
                columns[name].append(value)
    lists = {name: pa.list_(pa.int32()) for name in PER_TOKEN}
    table_ = pa.table({name: pa.array(values, type=lists.get(name)) for name, values in columns.items()})
    pq.write_table(table_, path, compression="zstd")


def write_rows(path: Path, splits: dict[str, Sequence[Example]]) -> dict[str, dict[str, Any]]:
    """``rows.json``: the ids of every split used. Returns their number and hash."""
    from calm.calibration import hash_rows

    told = {name: {"n": len(rows), "hash": hash_rows(rows)} for name, rows in splits.items()}
    document = {name: {**told[name], "ids": [row.id for row in rows]} for name, rows in splits.items()}
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    return told
