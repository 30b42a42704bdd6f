"""Model folders and corpora that the eval programs can be run on within seconds."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from calm import BatchDecoder, Full, save
from calm.config import DataConfig, SplitConfig
from calm.models.speaking import SpeakingModel
from calm.records import Example

from ..scripted import early_exit, examples, random_t5

LENGTH = 8
VOCABULARY = 60


def jsonl_settings(path: Path) -> DataConfig:
    split = SplitConfig(dev=0.15, calibration=0.45, test=0.35)
    return DataConfig(name="jsonl", path=str(path), max_source_tokens=16, max_target_tokens=LENGTH, split=split)


def write_jsonl(path: Path, rows: Sequence[Example]) -> Path:
    lines = [json.dumps({"source": row.source, "target": row.target}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Example]) -> Path:
    """In the columns of a published news corpus."""
    columns = {"id": [r.id for r in rows], "article": [r.source for r in rows], "highlights": [r.target for r in rows]}
    pq.write_table(pa.table(columns), path)
    return path


def tell_corpus(model: SpeakingModel, data: DataConfig) -> None:
    model.settings.data = json.loads(json.dumps(asdict(data)))


def random_folder(parent: Path, count: int = 260, model: SpeakingModel | None = None) -> Path:
    """A random model of four layers, a T5 unless it is given, and a corpus whose references are what it says at full
    depth.
    """
    model = model or early_exit(random_t5(vocabulary=VOCABULARY), length=LENGTH)
    rows = examples(VOCABULARY, count, longest=7)
    answers = BatchDecoder(model)(rows, Full())
    told = [Example(r.id, r.family, r.source, a.text or "w3") for r, a in zip(rows, answers, strict=True)]
    tell_corpus(model, jsonl_settings(write_jsonl(parent / "rows.jsonl", told)))
    return save(model, parent / "model")
