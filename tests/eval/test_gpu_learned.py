"""The part that trains: what is brought along, how its time is shared out, and what it needs on a bare machine."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from calm.config import BatchRule, RunnerName
from calm.data import debian, load_corpus, tokenised
from calm.data.text import text_ids
from calm.errors import DataError
from calm.models.folder import load
from eval import gpu_check, gpu_corpus
from eval.gpu_corpus import ABOUT, MODEL, ROWS, TOKENS, unpack
from eval.gpu_finetune import Training, begin, tokens_of_a_row
from eval.gpu_learned import Over, Stages, at_most
from tests.bare import ROOT, bare_path
from tests.eval.carried import carry
from tests.serve.models import engine_of, texts

PROGRAMS = (
    "train.settled", "train.run", "eval.calibrate", "eval.table1", "eval.throughput", "eval.latency",
    "eval.serving_run", "eval.gpu_check", "eval.gpu_parts", "eval.gpu_corpus",
)  # fmt: skip


def test_what_is_unpacked_is_the_corpus_with_its_ids(tmp_path: Path) -> None:
    folder = carry(tmp_path / "carried", tmp_path / "here")
    there = unpack(folder, tmp_path / "there")
    found, right = load_corpus(there.data), load_corpus(gpu_corpus.settings(tmp_path / "here"))
    about = json.loads((folder / ABOUT).read_text())
    assert found.name == debian.__name__.rpartition(".")[2] and found.splits == right.splits
    assert found.content_hash == right.content_hash == about["content_hash"]
    assert {name: len(rows) for name, rows in found.splits.items()} == about["rows"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known = tokenised.use(there.tokens, AutoTokenizer.from_pretrained(MODEL))
    for row in (found.splits["train"][0], found.splits["test"][-1]):
        assert known.get(row.source) == text_ids(tokenizer, row.source)
        assert known.get(row.target) == text_ids(tokenizer, row.target)


def test_what_is_missing_or_damaged_is_said_and_how_it_is_made(tmp_path: Path) -> None:
    folder = carry(tmp_path / "carried", tmp_path / "here", 200)
    for name in (ROWS, TOKENS):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="is damaged .*make gpu-carry writes it anew"):
            unpack(folder, tmp_path / f"cut {name}")
        (folder / name).write_bytes(whole)
    with pytest.raises(DataError, match="is missing; make gpu-carry writes it"):
        unpack(tmp_path / "none", tmp_path / "there")


def test_the_part_without_its_corpus_is_one_line_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "_in_a_process", lambda name, asked, seconds: gpu_check._measured(name, asked))
    earlier = Path("out/learned/summary.json")
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    assert gpu_check.main(["device=cpu", "parts=learned", "out=out", "carried=none"]) == gpu_check.FAILED
    assert earlier.is_file()  # what was measured before stays
    found = json.loads(Path("out/summary.json").read_text())["parts"]["learned"]
    assert found["status"] == "failed" and "rows.jsonl.xz is missing; make gpu-carry" in found["why"]


def test_it_begins_with_the_tokenizer_and_the_larger_vocabulary(tmp_path: Path) -> None:
    corpus = unpack(carry(tmp_path / "carried", tmp_path / "here", 300), tmp_path / "there")
    training = Training("cpu", "tiny", corpus, tmp_path)
    begun = begin(training)
    folder = load(training.begun)
    assert folder.vocab_size == len(folder.tokenizer) == 4096  # the tiny shape alone has 200
    assert (folder.settings.max_source_tokens, folder.settings.max_target_tokens) == (88, 24)
    assert folder.settings.exit_layers == list(range(1, folder.num_layers))
    mean = tokens_of_a_row(training, begun)
    assert 20 < mean["source"] <= 88 and 5 < mean["target"] <= 24


def test_a_stage_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def breaks(seconds: float) -> dict[str, float]:
        raise RuntimeError("the card\nis gone")

    kept: list[dict[str, Any]] = []
    stages = Stages(tmp_path, time.monotonic() + 50, lambda found: kept.append(dict(found)))
    assert not stages.run("first", 0.5, breaks)
    assert stages.run("second", 0.5, lambda seconds: {"seconds": seconds, "nan": float("nan")})
    assert stages.failed == ["first: RuntimeError: the card is gone"]
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["first"]["why"] == "RuntimeError: the card is gone"
    assert told["second"]["seconds"] == pytest.approx(25, abs=2) and told["second"]["nan"] is None
    assert [sorted(each) for each in kept] == [["first"], ["first", "second"]]
    late = Stages(tmp_path, time.monotonic() - 1, kept.append)
    assert not late.run("late", 1.0, breaks)
    assert "over before it could begin" in late.failed[0]


def test_a_stage_ends_with_its_share_of_the_time() -> None:
    began = time.monotonic()
    with pytest.raises(Over, match="ended after 0 s"), at_most(0.05):
        time.sleep(5)
    with at_most(0.2):
        pass
    time.sleep(0.25)  # nothing rings any more
    assert time.monotonic() - began < 3


def test_a_stage_does_not_end_in_the_middle_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: time.monotonic() < began + 0.5)
    with pytest.raises(Over), at_most(0.05):
        time.sleep(5)
    assert 0.5 < time.monotonic() - began < 3


def test_a_stage_ends_in_the_middle_of_an_engines_step(tmp_path: Path) -> None:
    """Which takes whatever a step raises for a row's own, and goes on."""
    engine = engine_of(BatchRule.own, runner=RunnerName.graph, max_batch=2)

    def decodes(seconds: float) -> dict[str, float]:
        while True:
            engine.generate(texts(8), ignore_eos=True)

    stages, began = Stages(tmp_path, time.monotonic() + 0.5, lambda found: None), time.monotonic()
    assert not stages.run("decoding", 1.0, decodes)
    assert time.monotonic() - began < 5 and "Over: it was ended after" in stages.failed[0]


def test_what_it_runs_needs_nothing_that_configures_tracks_or_fetches(tmp_path: Path) -> None:
    """Imports alone; the rehearsal, a slow test, runs all of it on such a machine."""
    bare = {"PYTHONPATH": bare_path(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", f"import {', '.join(PROGRAMS)}"], cwd=ROOT, env=bare, check=True)
