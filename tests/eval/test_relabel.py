"""Targets of a model's own: the candidate nearest to the reference, the same draws however rows are spread."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calm.config import RelabelConfig, RunnerName, SplitConfig
from calm.data import load_corpus
from calm.metrics import rouge_l_many
from calm.records import Example
from eval import relabel
from eval.relabel import choose
from serve.engine import Engine

from .folders import jsonl_settings, write_jsonl

SPLIT = SplitConfig(dev=0.1, calibration=0.1, test=0.1)


def test_the_candidate_nearest_to_the_reference_is_chosen() -> None:
    candidates = ["a tool", "a small tool", "a small tool for that", "small tool"]
    assert choose("a small tool for this", candidates, 0.0).target == "a small tool for that"
    found = choose("a small tool", candidates, 0.0)
    assert (found.target, found.best) == ("a small tool", 1.0) and found.greedy == pytest.approx(0.8)


def test_the_greedy_answer_stays_unless_it_is_beaten_by_the_margin() -> None:
    assert choose("a b c d", ["a b c", "a b c d"], 0.1).target == "a b c d"
    assert choose("a b c d", ["a b c", "a b c d"], 0.2).target == "a b c"
    assert choose("a b", ["a b", "a b"], 0.0) == relabel.Choice("a b", 1.0, 1.0)
    assert choose("x", ["", "y"], 0.0).target == ""


@pytest.fixture
def corpus(certified: Path, tmp_path: Path) -> Path:
    """The folder's sources, with references that the model does not say."""
    lines = (certified / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:120]
    told = [
        Example(str(i), str(i), a["source"], b["target"])
        for i, (a, b) in enumerate(zip(rows, rows[7:] + rows[:7], strict=True))
    ]
    return write_jsonl(tmp_path / "others.jsonl", told)


def relabelled(certified: Path, corpus: Path, run_dir: Path, **changes: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """(id -> target as written, the summary)."""
    run_dir.mkdir()
    data = replace(jsonl_settings(corpus), split=SPLIT)
    settings: dict[str, Any] = {"samples": 6, "batch_size": 8, "processes": 1, "runner": RunnerName.eager}
    config = RelabelConfig(str(certified / "model"), data=data, **{**settings, **changes})
    assert relabel.run(config, run_dir) == 0
    lines = [json.loads(line) for line in (run_dir / "relabelled.jsonl").read_text().splitlines()]
    return {line["id"]: line["target"] for line in lines}, json.loads((run_dir / "summary.json").read_text())


def test_train_rows_get_an_answer_of_the_model_that_is_no_farther_from_the_reference(
    certified: Path, corpus: Path, tmp_path: Path
) -> None:
    found, summary = relabelled(certified, corpus, tmp_path / "run")
    train = {
        row.id: row for row in load_corpus(replace(jsonl_settings(corpus), split=SPLIT), 0, ("train",)).splits["train"]
    }
    assert found and set(found) <= set(train)
    engine = Engine(certified / "model", runner=RunnerName.eager, max_batch=8)
    answers = engine.generate([train[name].source for name in found])
    targets = [train[name].target for name in found]
    greedy, chosen = rouge_l_many([a.text for a in answers], targets), rouge_l_many(list(found.values()), targets)
    assert all(mine >= theirs for mine, theirs in zip(chosen, greedy, strict=True))
    changed = [name for name, answer in zip(found, answers, strict=True) if found[name] != answer.text]
    assert len(changed) >= 5
    told = summary["relabel"]
    assert told["rows"] == len(found) and told["rows"] + told["empty"] == len(train)
    assert told["chosen_rouge_l"] > told["greedy_rouge_l"]
    assert told["drawn"] == pytest.approx(len(changed) / len(train))


def test_draws_depend_on_seed_and_row_alone(certified: Path, corpus: Path, tmp_path: Path) -> None:
    first, _ = relabelled(certified, corpus, tmp_path / "first")
    again, _ = relabelled(certified, corpus, tmp_path / "again", batch_size=3)
    other, _ = relabelled(certified, corpus, tmp_path / "other", seed=1)
    assert first == again and first != other
    few, _ = relabelled(certified, corpus, tmp_path / "few", max_rows=5)
    assert len(few) <= 5 and few.items() <= first.items()


def test_what_was_written_is_what_training_reads(certified: Path, corpus: Path, tmp_path: Path) -> None:
    found, _ = relabelled(certified, corpus, tmp_path / "run")
    data = replace(jsonl_settings(corpus), split=SPLIT)
    plain = load_corpus(data)
    new = load_corpus(replace(data, targets=str(tmp_path / "run" / "relabelled.jsonl")))
    assert {row.id: row.target for row in new.splits["train"]} == found
    for name in ("dev", "calibration", "test"):
        assert new.splits[name] == plain.splits[name]
    # a model that was trained on such targets is relabelled from the references again
    assert relabelled(certified, corpus, tmp_path / "once_more", output=None)[0] == found
